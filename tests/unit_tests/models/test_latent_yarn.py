"""YaRN in latent attention: what Hugging Face's library computes from the same settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.test_model_variants import MLA

LENGTH = 48


def built(settings: dict[str, Any]) -> tuple[torch.Tensor, float, float]:
    """The angles of each position, the concentration factor and the scores' scale of the first layer."""
    run, _ = start(tiny_config(**MLA, **settings))
    attention: Any = run.model[0].module.decoder.layers[0].self_attention
    angles, factor = attention.rotary_pos_emb(LENGTH)
    return angles[:, 0, 0], factor, attention.softmax_scale


@pytest.mark.parametrize(
    "scales", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.2}], ids=str
)
def test_it_is_that_of_published_models(scales: dict[str, float]) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
    theirs = DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **yarn, **scales},
    )
    rotary = DeepseekV3RotaryEmbedding(theirs)
    ((angles, factor, scale),) = run_ranks(
        built,
        1,
        {
            "model__position_embedding_type": "yarn",
            "model__yarn_rotary_scaling_factor": 8.0,
            "model__yarn_original_max_position_embeddings": 64,
            "model__yarn_beta_fast": 8.0,
            **{f"model__yarn_{name}": value for name, value in scales.items()},
        },
    )
    expected = torch.outer(torch.arange(LENGTH, dtype=torch.float32), rotary.inv_freq)
    torch.testing.assert_close(angles, torch.cat([expected, expected], dim=-1))
    assert factor == pytest.approx(rotary.attention_scaling)
    assert scale == pytest.approx(DeepseekV3Attention(theirs, 0).scaling)
    assert "mscale" not in scales or scale != pytest.approx(1 / math.sqrt(16))
