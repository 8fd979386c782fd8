"""What megatron-core's hybrid model leaves out, and its GPT model has."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.models.hybrids import HYBRID

MODELS: dict[str, dict[str, Any]] = {"gpt": {}, "hybrid": HYBRID}


def rotated(overrides: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """One query and one key in float64, at each of 16 positions, as the model rotates them."""
    config = tiny_config(**overrides)
    run, _, _ = start(config)
    angles = run.model[0].module.rotary_pos_emb(16).double()
    pair = torch.randn(2, config.model.kv_channels, dtype=torch.float64).expand(16, 1, 2, -1).contiguous()
    both = apply_rotary_pos_emb(pair, angles, config=run.core_config, cp_group=run.groups.cp)
    run.close()
    return both[:, 0, 0], both[:, 0, 1]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_rotary_embeddings_rotate(model: str, interleaved: bool) -> None:
    overrides = MODELS[model] | {"model__rotary_interleaved": interleaved}
    query, key = run_ranks(rotated, 1, overrides)[0]
    torch.testing.assert_close(query.norm(dim=-1), query[0].norm().expand(16), rtol=1e-6, atol=1e-6)
    scores = query @ key.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-5, atol=1e-5)  # distances alone
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1
