"""Which ranks must run equally many microbatches."""

from __future__ import annotations

import pytest

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.planner.scheduling import is_lockstep, lockstep_sizes, sync_ranks


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
    assert is_lockstep(model) == in_step
    assert sync_ranks(RankLayout(8 * tp * pp, tp=tp, pp=pp, ep=ep, etp=etp)) == neighbours


@pytest.mark.parametrize(("group", "multiple"), [(None, 2), (4, 4)])
def test_arguments_of_the_scheduler(group: int | None, multiple: int) -> None:
    model = ModelConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=group,
        expert_model_parallel_size=2,
    )
    found = lockstep_sizes(model, RankLayout(8, pp=2, ep=2))
    assert found == {"microbatch_multiple": multiple, "sync_ranks": 2, "pipeline_size": 2}
