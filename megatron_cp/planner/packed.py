"""Step time of packed samples of different lengths.

Uses the run's own scheduler and cost model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_cp.dynamic_cp.analysis.simulate import simulate
from megatron_cp.estimate.job import Job, TimeEstimate
from megatron_cp.estimate.time import on_shared_cores
from megatron_cp.planner.found import Models
from megatron_cp.planner.scheduling import lockstep_sizes, make_schedule
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

Time = Callable[[Job], TimeEstimate]

# Kinds of time that a step has once, independent of the number of microbatches.
_ONCE = ("exposed dp", "optimizer", "exposed pp", "bubble")


def packed_job(case: Case, lengths: Sequence[int]) -> Job:
    """Return the step with equal packs, each as full as the ranks allow."""
    model = case.config.model
    room = (model.max_seqlen_per_dp_cp_rank or 1) * model.context_parallel_size
    ends = list(itertools.accumulate(lengths))
    number = next((number for number, end in enumerate(ends) if end > room), len(ends))
    pack = tuple(lengths[:number]) or (room,)
    job = job_of(case, pack)
    assert job is not None
    count = max(1, -(-ends[-1] // (sum(pack) * job.layout.dp)))
    return replace(job, micro_batch_size=1, global_batch_size=count * job.layout.dp)


def packed_time(case: Case, lengths: Sequence[int], models: Models) -> TimeEstimate:
    """Schedule the samples of a global batch and simulate the step.

    Compute time is divided among kinds by the shares over all samples. ``imbalance`` is idle time: ranks that wait for
    other ranks or for the pipeline to fill.
    """
    model, job = case.config.model, packed_job(case, lengths)
    layout = job.layout
    cost = models.prices(job, max(model.max_seqlen_per_dp_cp_rank or 1, *lengths))
    found, lockstep = make_schedule(model, layout, lengths, cost), lockstep_sizes(model, layout)
    sync, stages = lockstep["sync_ranks"], lockstep["pipeline_size"]
    step = simulate(found, lengths, cost, sync_ranks=sync, pipeline_size=stages)
    bare, overhead, idle = step.shares(found.num_ranks, cost.ideal_seconds(lengths))
    once, work, flops = _split_work(job, lengths, models.alone)
    useful = bare * step.seconds / (sum(work.values()) or 1.0)
    kinds = {kind: useful * seconds for kind, seconds in work.items()}
    kinds["exposed cp"] = overhead * step.seconds
    kinds["imbalance"] = idle * step.seconds
    kinds |= once
    if models.cores:
        coupled = layout.tp * (1 if model.dynamic_context_parallel else layout.cp)
        kinds = on_shared_cores(kinds, models.cores, layout.world_size, coupled)
    return TimeEstimate(kinds, flops)


def least_seconds(case: Case, lengths: Sequence[int], time: Time) -> float:
    """Return a lower bound of the step time, in seconds.

    Assumes perfect balance, no context parallel messages, and for groups of a fixed size at least the longest sample.
    """
    job = packed_job(case, lengths)
    once, work, _ = _split_work(job, lengths, time)
    seconds = sum(work.values()) / job.layout.dp
    if not case.config.model.dynamic_context_parallel:
        longest = _split_work(job, (max(lengths),), time)[1]
        seconds = max(seconds, sum(longest.values()))
    return seconds + sum(once.values())


def _split_work(job: Job, lengths: Sequence[int], time: Time) -> tuple[dict[str, float], dict[str, float], float]:
    """Divide a step into work done once and work per sample.

    Returns:
        Seconds by kind of the work done once; seconds by kind of all samples on one replica; FLOPs of the step.
    """
    even, whole = time(job), time(replace(job, lengths=tuple(lengths), global_batch_size=job.layout.dp))
    once = {kind: even.kinds[kind] for kind in _ONCE if kind in even.kinds and kind != "bubble"}
    work = {kind: seconds for kind, seconds in whole.kinds.items() if kind not in (*_ONCE, "exposed cp", "host")}
    return once | {"host": even.kinds.get("host", 0.0)}, work, whole.model_flops / job.layout.dp
