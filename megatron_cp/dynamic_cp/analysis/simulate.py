"""Simulate an optimizer step of a schedule under a cost model, rank by rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.types import Group, Schedule, as_arrays


@dataclass(frozen=True)
class BusyTime:
    """Busy time of one group's microbatch, in seconds from the start of the step."""

    microbatch: int
    group: Group
    start: float
    stop: float


@dataclass(frozen=True)
class SimulatedStep:
    """Simulated step. ``seconds``: end of the slowest rank; ``spans``: by microbatch.

    With pipeline stages ``seconds`` includes the bubble and is multiplied by the number of stages, to compare with the
    same work on one stage; ``spans`` then show the microbatches without the pipeline. ``over_bare_work`` is
    seconds * ranks / bare work (no communication, no overhead): 1.0 is perfect.
    """

    seconds: float
    over_bare_work: float
    spans: list[BusyTime]

    def shares(self, num_ranks: int, bare_work: float) -> tuple[float, float, float]:
        """Return the shares of all ranks' time: bare work, overhead, and waiting.

        Overhead is communication and fixed costs.
        """
        total = self.seconds * num_ranks
        if not total:
            return 1.0, 0.0, 0.0
        busy = sum((span.stop - span.start) * span.group.cp_size for span in self.spans)
        return bare_work / total, (busy - bare_work) / total, 1.0 - busy / total


def _merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping intervals; the result is sorted and disjoint."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _keeping_step(groups: Sequence[Group], num_ranks: int, sync_ranks: int, alone: bool) -> list[tuple[int, int]]:
    """Return blocks of ranks that run a microbatch together.

    Blocks are groups, merged by the domains of ``sync_ranks`` that they touch. alone: add each rank without a group.
    """
    spans = [(group.ranks[0], group.ranks[-1] + 1) for group in groups]
    if sync_ranks > 1:
        domains = {rank // sync_ranks for start, stop in spans for rank in range(start, stop)}
        spans += [(d * sync_ranks, min((d + 1) * sync_ranks, num_ranks)) for d in domains]
    if alone:
        spans += [(rank, rank + 1) for rank in range(num_ranks)]
    return _merge(spans)


def seconds_of_groups(schedule: Schedule, lengths: Sequence[int] | np.ndarray, cost: CostModel) -> Iterator[float]:
    """Yield each group's seconds, in the order of the microbatches.

    :meth:`CostModel.seconds` computes the same for one group.
    """
    groups, ids = as_arrays(schedule)
    real = np.asarray(lengths, dtype=np.float64)[ids]
    if not ids.size:
        return
    starts = np.cumsum(groups[:, 3]) - groups[:, 3]
    sums = np.add.reduceat([real * real, real, real**3], starts, axis=1).T
    of_size = {size: cost.for_size(size) for size in np.unique(groups[:, 2]).tolist()}
    for (_, _, size, samples), sums_of_group in zip(groups.tolist(), sums.tolist(), strict=True):
        calls = cost.per_sample * cost.calls_of_pack(samples, size) if cost.per_sample else 0.0
        yield of_size[size].seconds(*sums_of_group) + calls


def simulate(
    schedule: Schedule,
    lengths: Sequence[int] | np.ndarray,
    cost: CostModel,
    *,
    sync_ranks: int = 1,
    pipeline_size: int = 1,
) -> SimulatedStep:
    """Simulate ``schedule``.

    A group starts when its last member is free. With ``sync_ranks`` the ranks of a domain (aligned blocks of that size)
    also start and finish each microbatch together. With ``pipeline_size`` > 1 every rank stands for a pipeline with the
    1F1B schedule, where a backward takes twice a forward.
    """
    ideal = cost.ideal_seconds(lengths) / schedule.num_ranks
    of_groups = seconds_of_groups(schedule, lengths, cost)
    free = np.zeros(schedule.num_ranks)
    spans: list[BusyTime] = []
    edges, durations = [], []  # per microbatch: starts of blocks, and seconds of each
    for k, groups in enumerate(schedule.microbatches):
        blocks = _keeping_step(groups, schedule.num_ranks, sync_ranks, alone=pipeline_size > 1)
        lasts, todo = [], deque(sorted(zip(groups, of_groups, strict=False)))
        for first, stop in blocks:
            start, last = float(free[first:stop].max()), 0.0
            while todo and todo[0][0].ranks[0] < stop:
                group, duration = todo.popleft()
                spans.append(BusyTime(k, group, start, start + duration))
                last = max(last, duration)
            free[first:stop] = start + last
            lasts.append(last)
        edges.append(np.array([first for first, _ in blocks]))
        durations.append(np.array(lasts))
    if pipeline_size == 1:
        total = float(free.max())
    else:
        total = _one_forward_one_backward(edges, durations, schedule.num_ranks, pipeline_size)
    return SimulatedStep(total, total / ideal if ideal else 1.0, spans)


def _one_forward_one_backward(
    edges: list[np.ndarray], durations: list[np.ndarray], num_ranks: int, stages: int
) -> float:
    """Return the makespan of 1F1B, times the number of stages.

    Microbatch k takes ``durations[k]`` on the blocks of ranks that start at ``edges[k]``.
    """
    count = len(edges)

    def run(k: int, ready: np.ndarray, share: float) -> np.ndarray:
        ends = np.maximum.reduceat(ready, edges[k]) + durations[k] * share
        return np.repeat(ends, np.diff(np.append(edges[k], num_ranks)))

    programs = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, count)
        steady = [(kind, k + warm_up if kind == "F" else k) for k in range(count - warm_up) for kind in "FB"]
        programs.append([("F", k) for k in range(warm_up)] + steady + [("B", k) for k in range(count - warm_up, count)])
    done: dict[tuple[str, int, int], np.ndarray] = {}
    free = [np.zeros(num_ranks) for _ in range(stages)]
    position = [0] * stages
    while any(position[stage] < len(programs[stage]) for stage in range(stages)):
        for stage in range(stages):
            while position[stage] < len(programs[stage]):
                kind, k = programs[stage][position[stage]]
                if kind == "F":
                    before = done.get(("F", k, stage - 1)) if stage else free[stage]
                else:
                    before = done.get(("B", k, stage + 1)) if stage < stages - 1 else done[("F", k, stage)]
                if before is None:
                    break
                free[stage] = run(k, np.maximum(before, free[stage]), (1 / 3 if kind == "F" else 2 / 3))
                done[(kind, k, stage)] = free[stage]
                position[stage] += 1
    return float(max(ends.max() for ends in free))
