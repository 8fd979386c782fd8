"""YaRN equals megatron-core's own module and Hugging Face's library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor_from_config,
)
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_cp.models.build import Build
from megatron_cp.models.builder import apply_yarn
from megatron_cp.models.families import hf_from_model
from megatron_cp.models.transformer_config import transformer_config
from megatron_cp.models.yarn import concentration
from tests.training_runs import tiny_config

YARN = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 4096,
    "kv_channels": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "another factor": {"yarn_rotary_scaling_factor": 3.0, "yarn_original_max_position_embeddings": 32768},
    "every setting": {
        "rotary_base": 150000.0,
        "yarn_beta_fast": 20.0,
        "yarn_beta_slow": 2.0,
        "yarn_mscale": 0.7,
        "yarn_mscale_all_dim": 0.5,
        "yarn_correction_range_round_to_int": False,
    },
    "not concentrated": {"yarn_mscale": 0.0, "yarn_mscale_all_dim": 0.0},
    "not longer": {"yarn_rotary_scaling_factor": 1.0},
    "shorter than a turn": {"yarn_original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_concentration_equal_transformers(name: str) -> None:
    config = tiny_config(**{f"model__{field}": value for field, value in (YARN | CASES[name]).items()})
    model = config.model
    plain = 1.0 / (int(model.rotary_base) ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    ours = torch.nn.Module()
    ours.inv_freq = plain.clone()
    apply_yarn(SimpleNamespace(rotary_pos_emb=ours), Build(model, None, None, 0, object))

    upstream = YarnRotaryEmbedding(
        64,
        rotary_base=int(model.rotary_base),
        use_cpu_initialization=True,
        scaling_factor=model.yarn_rotary_scaling_factor,
        original_max_position_embeddings=model.yarn_original_max_position_embeddings,
        beta_fast=model.yarn_beta_fast,
        beta_slow=model.yarn_beta_slow,
        mscale=model.yarn_mscale,
        mscale_all_dim=model.yarn_mscale_all_dim,
        correction_range_round_to_int=model.yarn_correction_range_round_to_int,
    )
    angles, factor = upstream.get_emb(2)
    published = AutoConfig.for_model(**hf_from_model(model, 256)[1])
    theirs, their_factor = ROPE_INIT_FUNCTIONS["yarn"](published, torch.device("cpu"))
    torch.testing.assert_close(ours.inv_freq, angles[1, 0, 0, :32], rtol=5e-7, atol=0)
    torch.testing.assert_close(ours.inv_freq, theirs, rtol=5e-7, atol=0)
    assert concentration(model) == pytest.approx(factor, rel=1e-12) == pytest.approx(their_factor, rel=1e-12)
    core_config = transformer_config(config.model, config.mixed_precision)
    assert _yarn_get_concentration_factor_from_config(core_config) == factor
    kept = torch.allclose(ours.inv_freq, plain, rtol=1e-6, atol=0)
    assert kept == (name in ("not longer", "shorter than a turn"))
