"""Which ranks must run equally many microbatches."""

from __future__ import annotations

import pytest

from megatron_cp.config import ModelConfig
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.training.scheduling import keeps_step, sync_ranks


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp", "in_step", "neighbours"),
    [
        (1, 1, 1, 1, False, 1),
        (2, 1, 1, 2, False, 1),
        (2, 1, 1, 1, False, 1),
        (1, 2, 1, 1, True, 1),
        (1, 1, 4, 1, True, 4),
        (2, 1, 4, 1, True, 2),
        (1, 1, 1, 2, True, 2),  # an expert's parts lie on two data-parallel ranks
        (1, 1, 2, 2, True, 4),
    ],
)
def test_ranks_that_share_experts_keep_step(
    tp: int, pp: int, ep: int, etp: int, in_step: bool, neighbours: int
) -> None:
    model = ModelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_moe_experts=4,
    )
    assert keeps_step(model) == in_step
    assert sync_ranks(RankLayout(8 * tp * pp, tp=tp, pp=pp, ep=ep, etp=etp)) == neighbours
