"""From a configuration to schedules: lockstep sizes, cost model, scheduler call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.dynamic_cp.analysis.report import rank_tokens
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.scheduler.fixed import schedule_fixed_cp
from megatron_cp.dynamic_cp.scheduler.schedule import estimated_seconds, schedule
from megatron_cp.dynamic_cp.token_buckets import BucketFit, fit_buckets, fit_to_batches
from megatron_cp.dynamic_cp.types import Schedule, in_buckets
from megatron_cp.estimate.prices import prices
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.rules.job import assumed_job, device_of
from megatron_cp.rules.remedies import Case


def is_lockstep(model: ModelConfig) -> bool:
    """Return whether all ranks must run equally many microbatches.

    Pipeline stages and shared experts communicate in each microbatch.
    """
    tp = model.tensor_model_parallel_size
    shared_experts = model.expert_model_parallel_size > 1 or (model.expert_tensor_parallel_size or tp) > tp
    return model.pipeline_model_parallel_size > 1 or shared_experts


def sequence_parallel_size(model: ModelConfig) -> int:
    """Return the number of tensor-parallel ranks that split a rank's tokens."""
    return model.tensor_model_parallel_size if model.sequence_parallel else 1


def make_schedule(model: ModelConfig, layout: RankLayout, lengths: Sequence[int], cost: CostModel) -> Schedule:
    """Return the configured schedule of one global batch, equal on every rank.

    Raises:
        ValueError: no schedule is possible.
    """
    assert model.max_seqlen_per_dp_cp_rank is not None
    lockstep, num_ranks, most = lockstep_sizes(model, layout), layout.dp * layout.cp, model.max_seqlen_per_dp_cp_rank
    common: dict[str, Any] = {"cost": cost, "sequence_parallel_size": sequence_parallel_size(model)}
    if model.dynamic_context_parallel:
        minimum = model.min_dynamic_context_parallel_size
        return schedule(lengths, num_ranks, most, min_cp_size=minimum, **lockstep, **common)
    common["microbatch_multiple"] = lockstep["microbatch_multiple"]
    return schedule_fixed_cp(lengths, num_ranks, most, cp_size=layout.cp, **common)


def estimated_step(model: ModelConfig, layout: RankLayout, lengths: Sequence[int], cost: CostModel) -> float:
    """Estimate the seconds of a batch with dynamic CP, without a schedule."""
    assert model.max_seqlen_per_dp_cp_rank is not None
    return estimated_seconds(
        lengths,
        layout.dp * layout.cp,
        model.max_seqlen_per_dp_cp_rank,
        cost=cost,
        min_cp_size=model.min_dynamic_context_parallel_size,
        sync_ranks=sync_ranks(layout),
        pipeline_size=1 + (layout.pp - 1) / (model.virtual_pipeline_model_parallel_size or 1),
        sequence_parallel_size=sequence_parallel_size(model),
    )


def evaluation_model(training: ModelConfig, size: int | None, micro_batch_size: int) -> ModelConfig:
    """Return evaluation's model settings, with a context parallel ``size`` of its own."""
    if size is None:
        return training
    model = replace(
        training,
        context_parallel_size=size,
        hierarchical_context_parallel_sizes=None,
        dynamic_context_parallel=False,
        sequence_packing_scheduler="dp_balanced",
    )
    minimum = training.max_seqlen_per_dp_cp_rank or micro_batch_size * model.tokens_per_rank
    return replace(model, max_seqlen_per_dp_cp_rank=max(minimum, model.tokens_per_rank))


def most_tokens(case: Case) -> int:
    """Return the most tokens of a rank in a pack, in training and evaluation."""
    config = case.config
    evaluated = evaluation_model(config.model, config.dist.eval_context_parallel_size, config.evaluation_batch[1])
    return max(each.max_seqlen_per_dp_cp_rank or 0 for each in (config.model, evaluated))


def fit_token_buckets(
    case: Case,
    scheduler: Callable[[Sequence[int]], Schedule],
    lengths: Callable[[Sequence[int]], Sequence[int]],
    global_batch_size: int,
    num_batches: int,
) -> BucketFit:
    """Fit the configured number of buckets to the first of ``num_batches``.

    A run that starts anywhere fits them to the same batches, and so finds the same.

    Args:
        scheduler: function from a batch's lengths to its schedule.
        lengths: function from the indices of samples to their lengths.
    """
    model = case.config.model
    first = (range(k * global_batch_size, (k + 1) * global_batch_size) for k in range(num_batches))
    return fit_to_batches(
        ((scheduler(batch), batch) for batch in map(lengths, first)),
        model.packed_shape_buckets,
        most_tokens(case),
        placement=model.packed_placement,
        lockstep=is_lockstep(model),
    )


def padding_of_buckets(case: Case, found: Schedule, lengths: Sequence[int]) -> float:
    """Estimate the tokens a rank that buckets add to a batch, without dummies.

    A run's buckets are fitted to more batches. Buckets that are fitted to the packs themselves pad them less. Those of
    half of the packs pad the other half more. This is the mean of both.
    """
    model = case.config.model
    tokens, ranks = rank_tokens(found, lengths, model.packed_placement)
    unit, whole, even, odd = 2 * found.sequence_parallel_size, slice(None), slice(0, None, 2), slice(1, None, 2)
    added = 0.0
    for fitted, padded, share in ((whole, whole, 0.5), (even, odd, 0.5), (odd, even, 0.5)):
        buckets = fit_buckets(tokens[fitted], ranks[fitted], model.packed_shape_buckets, most_tokens(case), unit)
        added += share * float((in_buckets(tokens[padded], buckets) - tokens[padded]) @ ranks[padded])
    return added / found.num_ranks


def lockstep_sizes(model: ModelConfig, layout: RankLayout) -> dict[str, Any]:
    """Return ``microbatch_multiple``, ``sync_ranks`` and ``pipeline_size`` of a run."""
    multiple = 1
    if model.virtual_pipeline_model_parallel_size is not None:
        multiple = model.microbatch_group_size_per_vp_stage or model.pipeline_model_parallel_size
    return {"microbatch_multiple": multiple, "sync_ranks": sync_ranks(layout), "pipeline_size": layout.pp}


def schedule_fields(model: ModelConfig, layout: RankLayout) -> dict[str, Any] | None:
    """Return the run's fields of each ``schedules.jsonl`` line; None if not packed."""
    if model.sequence_packing_scheduler is None:
        return None
    return dict(context_parallel_size=model.context_parallel_size, **lockstep_sizes(model, layout))


def sync_ranks(layout: RankLayout) -> int:
    """Return how many neighbouring ranks share experts, and so every microbatch."""
    domain = layout.dp * layout.cp
    sharing = -(-layout.ep * layout.etp // layout.tp)
    return sharing if domain % sharing == 0 else domain


def model_cost(case: Case) -> CostModel:
    """Return the cost model of a run, from the time model.

    A fit with numpy: another kind of CPU may get other last digits.
    """
    config, environment = case.config, case.environment
    job = assumed_job(case)
    longest = max(config.dataset.seq_length, config.model.max_seqlen_per_dp_cp_rank or 1)
    return prices(job, longest, device_of(environment), environment.gpus_per_node)
