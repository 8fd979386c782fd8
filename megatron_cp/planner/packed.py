"""The step time of packed samples of different lengths: scheduled as a run does it, with the time model's prices."""

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
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

Time = Callable[[Job], TimeEstimate]

# What a step has once, whatever its microbatches are.
_ONCE = ("exposed dp", "optimizer", "exposed pp", "bubble")


def packed_job(case: Case, lengths: Sequence[int]) -> Job:
    """Return the step as if all packs were as full as ranks allow, and alike."""
    model = case.config.model
    room = (model.max_seqlen_per_dp_cp_rank or 1) * model.context_parallel_size
    ends = list(itertools.accumulate(lengths))
    number = next((number for number, end in enumerate(ends) if end > room), len(ends))
    pack = tuple(lengths[:number]) or (room,)
    job = job_of(case, pack)
    assert job is not None
    count = max(1, -(-ends[-1] // (sum(pack) * job.layout.dp)))
    return replace(job, micro_batch_size=1, global_batch_size=count * job.layout.dp)


def packed_time(case: Case, lengths: Sequence[int], time: Time) -> TimeEstimate:
    """Schedule the samples of a global batch and simulate the step.

    Kinds of work have the shares that all samples together have of them; ``imbalance`` is the time that ranks wait
    for others, or for the pipeline to fill.
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
    once, work, flops = _parts(job, lengths, time)
    useful = simulated.useful * simulated.seconds / (sum(work.values()) or 1.0)
    kinds = {kind: useful * seconds for kind, seconds in work.items()}
    kinds["exposed cp"] = simulated.overhead * simulated.seconds
    kinds["imbalance"] = simulated.idle * simulated.seconds
    return TimeEstimate(kinds | once, flops)


def least_seconds(case: Case, lengths: Sequence[int], time: Time) -> float:
    """Return the step's time if all ranks had as much to do, and sent each other nothing of a sample."""
    job = packed_job(case, lengths)
    once, work, _ = _parts(job, lengths, time)
    return sum(work.values()) / job.layout.dp + sum(once.values())


def _parts(job: Job, lengths: Sequence[int], time: Time) -> tuple[dict[str, float], dict[str, float], float]:
    """Seconds of a step's ends, those of the work of all samples on one replica, and the operations of the step."""
    even, whole = time(job), time(replace(job, lengths=tuple(lengths), global_batch_size=job.layout.dp))
    once = {kind: even.kinds[kind] for kind in _ONCE if kind in even.kinds and kind != "bubble"}
    work = {kind: seconds for kind, seconds in whole.kinds.items() if kind not in (*_ONCE, "exposed cp", "host")}
    return once | {"host": even.kinds.get("host", 0.0)}, work, whole.model_flops / job.layout.dp


def prices(job: Job, limit: int, time: Time) -> CostModel:
    """Return the cost model of a layout's groups that the time model comes to.

    One rank's microbatches of three lengths give its fixed, linear and quadratic seconds; groups of two ranks, inside
    and across nodes, the seconds that messages add.
    """
    tokens = np.array([max(64, limit // 16), max(128, limit // 4), max(256, limit)])
    seconds = np.array([_busy(time(_of_group(job, int(length), 1))) for length in tokens])
    quadratic, linear, fixed = np.linalg.solve(np.stack([tokens**2, tokens, tokens**0], axis=1).astype(float), seconds)
    ranks = job.layout.dp * job.layout.cp
    sizes = [size for size in (2, ranks) if 1 < size <= ranks]
    moved = [_moved(time(_of_group(job, limit * size, size)), limit * size, size) for size in sizes] or [0.0]
    return CostModel(
        per_microbatch=max(0.0, float(fixed)),
        quadratic=max(0.0, float(quadratic)),
        linear=max(1e-12, float(linear)),
        kv_intra=moved[0],
        kv_inter=moved[-1],
        overlap=0.0,
    )


def _busy(estimate: TimeEstimate) -> float:
    return sum(seconds for kind, seconds in estimate.kinds.items() if kind not in _ONCE)


def _moved(estimate: TimeEstimate, tokens: int, size: int) -> float:
    """Exposed seconds a token of a group's messages."""
    return estimate.kinds.get("exposed cp", 0.0) / (tokens * (size - 1) / size)


def _of_group(job: Job, length: int, size: int) -> Job:
    """A microbatch of one sample on each group of so many ranks."""
    model = copy.copy(job.model)
    model.context_parallel_size = size
    layout = replace(job.layout, cp=size, hierarchical=None)
    return replace(job, model=model, layout=layout, lengths=(length,), global_batch_size=layout.dp)
