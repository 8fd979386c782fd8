"""Lengths in, schedule out: the one entry of dynamic context parallelism's scheduling. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_cp.dynamic_cp.cost import DEFAULT_COST, CostModel
from megatron_cp.dynamic_cp.problem import Problem, make_problem
from megatron_cp.dynamic_cp.tree import Placement, balance
from megatron_cp.dynamic_cp.types import Group, Schedule


def schedule(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    max_seqlen_per_rank: int,
    *,
    min_cp_size: int = 1,
    cost: CostModel | None = None,
    sync_ranks: int = 1,
    pipeline_size: int = 1,
    microbatch_multiple: int = 1,
    sequence_parallel_size: int = 1,
) -> Schedule:
    """Schedule one global batch of samples of ``lengths`` tokens on ``num_ranks`` data-and-context-parallel ranks."""
    cost = cost or DEFAULT_COST
    problem = make_problem(lengths, num_ranks, max_seqlen_per_rank, min_cp_size, cost, sequence_parallel_size)
    best: tuple[float, Placement] = (0.0, [])
    if problem.lengths.size:
        limits = [problem.mean_load * factor for factor in (3.0, 1.1, 0.8)]
        best = min((balance(problem, problem.levels_under(limit)) for limit in limits), key=lambda found: found[0])
    microbatches = _in_order(problem, best[1])
    while len(microbatches) % microbatch_multiple:
        microbatches.append([])
    return Schedule(num_ranks, max_seqlen_per_rank, microbatches, sequence_parallel_size)


def _in_order(problem: Problem, placement: Placement) -> list[list[Group]]:
    """Number each block's microbatches after those of the wider blocks around it."""
    done = [0] * problem.tree.num_ranks
    order = problem.order.tolist()
    microbatches: list[list[Group]] = []
    for (start, stop), bins in placement:
        ranks = tuple(range(start, stop))
        first = done[start]
        while len(microbatches) < first + len(bins):
            microbatches.append([])
        for k, b in enumerate(bins):
            microbatches[first + k].append(Group(ranks, tuple([order[x] for x in b])))
        done[start:stop] = [first + len(bins)] * (stop - start)
    for groups in microbatches:
        groups.sort()
    return microbatches
