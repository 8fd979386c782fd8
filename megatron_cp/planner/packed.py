"""Step time of packed samples of different lengths.

Uses the run's own scheduler and cost model.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_cp.dynamic_cp.analysis.simulate import simulate
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.estimate.job import Job, TimeEstimate
from megatron_cp.estimate.time import on_shared_cores
from megatron_cp.planner.found import Models
from megatron_cp.planner.scheduling import estimated_step, lockstep_sizes, make_schedule, padding_of_buckets
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

Time = Callable[[Job], TimeEstimate]

# Kinds of time that a step has once, independent of the number of microbatches.
_ONCE = ("exposed dp", "optimizer", "exposed pp", "bubble")


def packed_job(case: Case, lengths: Sequence[int]) -> Job:
    """Return the step with equal packs, each as full as the ranks allow."""
    model = case.config.model
    room = (model.max_seqlen_per_dp_cp_rank or 1) * model.context_parallel_size
    pack, tokens = _first_pack(tuple(lengths), room)
    job = job_of(case, pack)
    assert job is not None
    count = max(1, -(-tokens // (sum(pack) * job.layout.dp)))
    return replace(job, micro_batch_size=1, global_batch_size=count * job.layout.dp)


@functools.lru_cache
def _first_pack(lengths: tuple[int, ...], room: int) -> tuple[tuple[int, ...], int]:
    """Return the samples that fit in ``room`` tokens, and all samples' tokens."""
    ends = list(itertools.accumulate(lengths))
    return lengths[: bisect.bisect_right(ends, room)] or (room,), ends[-1]


def packed_time(case: Case, lengths: Sequence[int], models: Models) -> TimeEstimate:
    """Schedule the samples of a global batch and simulate the step.

    Compute time is divided among kinds by the shares over all samples. ``imbalance`` is idle time: ranks that wait for
    other ranks or for the pipeline to fill. ``padding``: tokens that buckets add, the mean of all ranks.
    """
    model, job = case.config.model, packed_job(case, lengths)
    layout = job.layout
    cost = _cost(job, lengths, models)
    found, lockstep = make_schedule(model, layout, lengths, cost), lockstep_sizes(model, layout)
    sync, stages = lockstep["sync_ranks"], lockstep["pipeline_size"]
    step = simulate(found, lengths, cost, sync_ranks=sync, pipeline_size=stages)
    full = max(span.stop for span in step.spans)  # seconds without the pipeline's fill and drain
    fill = (step.seconds - full) / (model.virtual_pipeline_model_parallel_size or 1)
    step = replace(step, seconds=full + fill)
    bare, overhead, idle = step.shares(found.num_ranks, cost.ideal_seconds(lengths))
    once, work, flops = _split_work(job, lengths, models.alone)
    useful = bare * step.seconds / (sum(work.values()) or 1.0)
    kinds = {kind: useful * seconds for kind, seconds in work.items()}
    kinds["exposed cp"] = overhead * step.seconds
    kinds["imbalance"] = idle * step.seconds
    if model.packed_shape_buckets:
        kinds["padding"] = cost.linear * padding_of_buckets(case, found, lengths)
    kinds |= {kind: seconds for kind, seconds in once.items() if kind != "bubble"}
    if models.cores:
        coupled = layout.tp * (1 if model.dynamic_context_parallel else layout.cp)
        kinds = on_shared_cores(kinds, models.cores, layout.world_size, coupled)
    return TimeEstimate(kinds, flops)


def quick_seconds(case: Case, lengths: Sequence[int], models: Models) -> float:
    """Estimate the seconds of :func:`packed_time` without a schedule.

    Takes about a tenth of the time. Dynamic context parallelism is estimated by its scheduler. Groups of a fixed size
    are estimated with equal packs, which may be far too low where messages are exposed.
    """
    model, job = case.config.model, packed_job(case, lengths)
    even = models.time(job)
    if not model.dynamic_context_parallel:
        return even.seconds
    once = sum(seconds for kind, seconds in even.kinds.items() if kind in _ONCE and kind != "bubble")
    return estimated_step(model, job.layout, lengths, _cost(job, lengths, models)) + once


def least_seconds(case: Case, lengths: Sequence[int], time: Time) -> float:
    """Return an estimate of the step time, in seconds, that is nearly always too low.

    Assumes equal packs, each as full as the ranks allow, perfect balance, no context parallel messages, and for groups
    of a fixed size at least the longest sample.
    """
    job = packed_job(case, lengths)
    once, work, _ = _split_work(job, lengths, time)
    seconds = sum(work.values()) / job.layout.dp
    if not case.config.model.dynamic_context_parallel:
        longest = _split_work(job, (max(lengths),), time)[1]
        seconds = max(seconds, sum(longest.values()))
    return seconds + sum(once.values())


def _cost(job: Job, lengths: Sequence[int], models: Models) -> CostModel:
    return models.prices(job, max(job.model.max_seqlen_per_dp_cp_rank or 1, *lengths))


def _split_work(job: Job, lengths: Sequence[int], time: Time) -> tuple[dict[str, float], dict[str, float], float]:
    """Divide a step into work done once and work per sample.

    Returns:
        Seconds by kind of the work done once; seconds by kind of all samples on one replica; FLOPs of the step.
    """
    even, whole = time(job), time(replace(job, lengths=tuple(lengths), global_batch_size=job.layout.dp))
    once = {kind: even.kinds[kind] for kind in _ONCE if kind in even.kinds}
    work = {kind: seconds for kind, seconds in whole.kinds.items() if kind not in (*_ONCE, "exposed cp", "host")}
    return once | {"host": even.kinds.get("host", 0.0)}, work, whole.model_flops / job.layout.dp
