"""Step time of packed samples of different lengths.

Uses the run's own scheduler, with a cost model fitted to the time estimates.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_cp.dynamic_cp.analysis.report import report
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.scheduler.fixed import schedule_fixed_cp
from megatron_cp.dynamic_cp.scheduler.schedule import schedule
from megatron_cp.estimate.job import Job, TimeEstimate
from megatron_cp.estimate.time import on_shared_cores
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


def packed_time(case: Case, lengths: Sequence[int], time: Time, cores: int = 0) -> TimeEstimate:
    """Schedule the samples of a global batch and simulate the step.

    Compute time is divided among kinds by the shares over all samples. ``imbalance`` is idle time: ranks that wait for
    other ranks or for the pipeline to fill.

    Args:
        time: estimate for ranks that share no cores.
        cores: processor cores that all ranks share; 0 if each has its own.
    """
    model, job = case.config.model, packed_job(case, lengths)
    layout = job.layout
    ranks, limit = layout.dp * layout.cp, model.max_seqlen_per_dp_cp_rank or 1
    cost = prices(job, limit, time)
    array, width = np.asarray(lengths), layout.tp if model.sequence_parallel else 1
    virtual = model.virtual_pipeline_model_parallel_size
    multiple = layout.pp if virtual else 1
    if model.dynamic_context_parallel:
        found = schedule(
            array, ranks, limit, min_cp_size=model.min_dynamic_context_parallel_size, cost=cost, sync_ranks=layout.ep,
            pipeline_size=layout.pp, microbatch_multiple=multiple, sequence_parallel_size=width,
        )  # fmt: skip
    else:
        found = schedule_fixed_cp(
            array, ranks, limit, cp_size=layout.cp, cost=cost, microbatch_multiple=multiple,
            sequence_parallel_size=width,
        )  # fmt: skip
    simulated = report("", found, array, cost, sync_ranks=min(layout.ep, ranks), pipeline_size=layout.pp)
    once, work, flops = _split_work(job, lengths, time)
    useful = simulated.useful * simulated.seconds / (sum(work.values()) or 1.0)
    kinds = {kind: useful * seconds for kind, seconds in work.items()}
    kinds["exposed cp"] = simulated.overhead * simulated.seconds
    kinds["imbalance"] = simulated.idle * simulated.seconds
    kinds |= once
    if cores:
        coupled = layout.tp * (1 if model.dynamic_context_parallel else layout.cp)
        kinds = on_shared_cores(kinds, cores, layout.world_size, coupled)
    return TimeEstimate(kinds, flops)


def least_seconds(case: Case, lengths: Sequence[int], time: Time) -> float:
    """Return a lower bound of the step time, in seconds.

    Assumes perfect balance and no context parallel messages.
    """
    job = packed_job(case, lengths)
    once, work, _ = _split_work(job, lengths, time)
    return sum(work.values()) / job.layout.dp + sum(once.values())


def _split_work(job: Job, lengths: Sequence[int], time: Time) -> tuple[dict[str, float], dict[str, float], float]:
    """Divide a step into work done once and work per sample.

    Returns:
        Seconds by kind of the work done once; seconds by kind of all samples on one replica; FLOPs of the step.
    """
    even, whole = time(job), time(replace(job, lengths=tuple(lengths), global_batch_size=job.layout.dp))
    once = {kind: even.kinds[kind] for kind in _ONCE if kind in even.kinds and kind != "bubble"}
    work = {kind: seconds for kind, seconds in whole.kinds.items() if kind not in (*_ONCE, "exposed cp", "host")}
    return once | {"host": even.kinds.get("host", 0.0)}, work, whole.model_flops / job.layout.dp


def prices(job: Job, limit: int, time: Time) -> CostModel:
    """Fit a scheduler's cost model to the time model.

    Microbatches of three lengths on one rank give the fixed, linear and quadratic terms. Groups of two ranks and of all
    ranks give the cost of messages inside and across nodes.

    Args:
        limit: tokens that a rank may hold.
    """
    tokens = np.array([max(64, limit // 16), max(128, limit // 4), max(256, limit)])
    seconds = np.array([_work_seconds(time(_with_group_size(job, int(length), 1))) for length in tokens])
    quadratic, linear, fixed = np.linalg.solve(np.stack([tokens**2, tokens, tokens**0], axis=1).astype(float), seconds)
    ranks = job.layout.dp * job.layout.cp
    sizes = [size for size in (2, ranks) if 1 < size <= ranks]
    moved = [
        _exposed_per_token(time(_with_group_size(job, limit * size, size)), limit * size, size) for size in sizes
    ] or [0.0]
    return CostModel(
        per_microbatch=max(0.0, float(fixed)),
        quadratic=max(0.0, float(quadratic)),
        linear=max(1e-12, float(linear)),
        kv_intra=moved[0],
        kv_inter=moved[-1],
        overlap=0.0,
    )


def _work_seconds(estimate: TimeEstimate) -> float:
    return sum(seconds for kind, seconds in estimate.kinds.items() if kind not in _ONCE)


def _exposed_per_token(estimate: TimeEstimate, tokens: int, size: int) -> float:
    """Return the exposed communication of a group, in seconds per token."""
    return estimate.kinds.get("exposed cp", 0.0) / (tokens * (size - 1) / size)


def _with_group_size(job: Job, length: int, size: int) -> Job:
    """Return a step with one sample of ``length`` tokens per group of ``size`` ranks."""
    model = copy.copy(job.model)
    model.context_parallel_size = size
    layout = replace(job.layout, cp=size, hierarchical=None)
    return replace(job, model=model, layout=layout, lengths=(length,), global_batch_size=layout.dp)
