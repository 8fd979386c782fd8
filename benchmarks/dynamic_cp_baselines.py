"""Baselines for the dynamic CP scheduler: two other schedulers and a lower bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.dynamic_cp_greedy import greedy_per_microbatch
from megatron_cp.dynamic_cp import CostModel, Schedule
from megatron_cp.dynamic_cp.scheduler.problem import make_problem


def greedy(lengths: np.ndarray, num_ranks: int, max_seqlen_per_rank: int, cost: CostModel) -> Schedule:
    """Schedule by the greedy rule of Megatron-LM's development branch.

    Reimplemented. Groups have power-of-two ranks.
    """
    problem = make_problem(lengths, num_ranks, max_seqlen_per_rank, 1, cost, 1)
    return Schedule(num_ranks, max_seqlen_per_rank, greedy_per_microbatch(problem))


def shipped_scheduler(num_ranks: int, max_seqlen_per_rank: int) -> Any:
    """Schedule by megatron-core 0.19's BalancedCPScheduler.

    Without process groups.
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Ranks:
        def size(self) -> int:
            return num_ranks

    return BalancedCPScheduler(max_seqlen_per_rank, Ranks())


def shipped_seconds(assignment: list[list[list[int]]], lengths: np.ndarray, cost: CostModel) -> float:
    """Return the seconds of a step as megatron-core 0.19 runs it.

    Each sample runs on its own, with a barrier after each round.
    """
    total = 0.0
    for round_ in assignment:
        holders: dict[int, int] = {}
        for samples in round_:
            for x in samples:
                holders[x] = holders.get(x, 0) + 1
        total += max(sum(cost.seconds([int(lengths[x])], holders[x]) for x in samples) for samples in round_)
    return total


def lower_bound(lengths: np.ndarray, num_ranks: int, max_seqlen_per_rank: int, cost: CostModel) -> float:
    """Return a lower bound of the seconds of a step.

    It is evenly spread work, or the costliest sample. The work is attention at the smallest CP size that a sample fits
    (short tiles included), the linear part, and the overhead of the fewest possible microbatches. Communication is
    free. The costliest sample runs on its best CP size.
    """
    sizes = [1 << i for i in range(num_ranks.bit_length())]
    s = lengths.astype(np.float64)
    needs = np.stack([-(-lengths // (2 * c)) * 2 for c in sizes])
    smallest = np.array(sizes)[(needs <= max_seqlen_per_rank).argmax(axis=0)]
    work = float(np.sum((cost.quadratic * (s + cost.small_tile * smallest) + cost.linear) * s))
    work += cost.per_microbatch * -(-int(lengths.sum()) // max_seqlen_per_rank)
    alone = np.stack([cost.sample_seconds(lengths, c) for c in sizes])
    alone[needs > max_seqlen_per_rank] = np.inf
    return max(work / num_ranks, float(alone.min(axis=0).max()))
