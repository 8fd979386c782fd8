"""Ranks that must run equally many microbatches, and the padding of packs."""

from __future__ import annotations

import pytest

from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.dynamic_cp.analysis.report import rank_tokens
from megatron_cp.dynamic_cp.cost import DEFAULT_COST
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.dynamic_cp.token_buckets import fit_to_batches
from megatron_cp.dynamic_cp.types import in_buckets
from megatron_cp.estimate.device import load_device
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.planner.found import Models
from megatron_cp.planner.packed import packed_job, packed_time
from megatron_cp.planner.scheduling import (
    is_lockstep,
    lockstep_sizes,
    make_schedule,
    padding_of_buckets,
    sync_ranks,
)
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.remedies import Case


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


def test_plans_count_the_padding_of_buckets() -> None:
    """One batch says about how much buckets fitted to other batches pad it."""
    words = ["model.sequence_packing_scheduler=default_dynamic_cp", "model.dynamic_context_parallel=true"]
    words += ["model.max_seqlen_per_dp_cp_rank=16384", "model.context_parallel_size=8", "train.micro_batch_size=1"]
    batches = sample_lengths("documents", 9 * 512, 131072).reshape(9, 512).tolist()
    models, kinds = Models.on(load_device("h100"), 8), {}
    for number in (0, 1, 16):
        config = load_recipe("llama31_8b_pretrain_config", [*words, f"model.packed_shape_buckets={number}"])
        case = Case(config, 8, 8, Environment.of("gpu"))
        kinds[number] = packed_time(case, tuple(batches[0]), models).kinds
    added = {number: kinds[number].pop("padding", None) for number in kinds}
    assert kinds[0] == kinds[1] == kinds[16]
    assert added[0] is None and added[1] > added[16] > 0

    layout = packed_job(case, batches[0]).layout
    plans = [make_schedule(config.model, layout, lengths, DEFAULT_COST) for lengths in batches]
    fit = fit_to_batches(zip(plans[1:], batches[1:], strict=True), 16, 16384, placement="zigzag", lockstep=False)
    tokens, ranks = rank_tokens(plans[0], batches[0], "zigzag")
    true = (in_buckets(tokens, fit.tokens) - tokens) @ ranks / 8
    assert padding_of_buckets(case, plans[0], batches[0]) == pytest.approx(true, rel=0.5)
