"""Schedule dynamic context parallelism. Pure, deterministic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Integral

import numpy as np

from megatron_cp.dynamic_cp.analysis.simulate import simulate
from megatron_cp.dynamic_cp.buddy_tree import BuddyTree, buddy_tree
from megatron_cp.dynamic_cp.cost import DEFAULT_COST, CostModel
from megatron_cp.dynamic_cp.scheduler.fixed import schedule_fixed_cp
from megatron_cp.dynamic_cp.scheduler.jobs import Shelf
from megatron_cp.dynamic_cp.scheduler.placement import GroupPlan, build
from megatron_cp.dynamic_cp.scheduler.problem import Problem, make_problem
from megatron_cp.dynamic_cp.types import Group, Schedule

# Number of plans tried for a batch: about this many samples and ranks in total, so that time stays n log n.
_EFFORT = 15_000
_MOST_PLANS = 24
# Number of most promising limits that are also planned with wide jobs filled up first.
_STARTS_WITH_FILL = 4
# Limits tried as long as no plan is within this factor of the estimate.
_TRIED, _GOOD = 3, 1.03
# Groups of one size are also tried if they may take less than this fraction of the plan's seconds.
_WORTH_A_TRY = 0.995


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
    """Distribute a global batch over ranks for the shortest step.

    lengths: tokens of each sample; the schedule refers to samples by index.
    num_ranks: data parallel size times context parallel size; any number, not only powers of two.
    max_seqlen_per_rank: largest number of tokens of a rank in one microbatch, padding included.
    min_cp_size: smallest number of ranks of a group.
    cost: seconds of a microbatch; the default suits an 8B model on H100s. Wrong numbers make schedules slower, never
        incorrect. Its placement must be the run's: it determines the padding.
    sync_ranks: ranks that synchronize in every microbatch, in aligned blocks: the expert parallel size, or num_ranks
        for a barrier. 1 for dense models.
    pipeline_size: pipeline stages; with more than one, all ranks run in lockstep and the bubble counts.
    microbatch_multiple: the number of microbatches is a multiple of it (interleaved pipeline stages require it).
    sequence_parallel_size: tensor parallel size with sequence parallelism, else 1; samples are padded to it.

    Every sample appears exactly once, groups come from ``legal_groups(num_ranks, min_cp_size)``, and the same input
    gives the same schedule everywhere. Ranks without a group in a microbatch are idle (``Schedule.idle_slots``).
    Raises ValueError for a sample that does not fit, with the smallest setting that would hold it.

    The search: for several limits on a microbatch's seconds, each sample gets the fewest ranks within the limit; the
    most promising limits are planned in full (:mod:`.placement`). Groups of one size (:mod:`.fixed`) are tried where
    they may be faster. Time is O(n log n + num_ranks log num_ranks).
    """
    sizes = {
        "num_ranks": num_ranks,
        "max_seqlen_per_rank": max_seqlen_per_rank,
        "pipeline_size": pipeline_size,
        "microbatch_multiple": microbatch_multiple,
        "sequence_parallel_size": sequence_parallel_size,
    }
    for name, value in (sizes | {"min_cp_size": min_cp_size, "sync_ranks": sync_ranks}).items():
        if not isinstance(value, Integral):
            raise ValueError(f"{name}={value!r}: must be an integer")
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if sync_ranks < 1 or num_ranks % sync_ranks:
        raise ValueError(
            f"sync_ranks={sync_ranks}: must divide the number of ranks ({num_ranks}), because ranks that synchronize "
            "in every microbatch form equal aligned blocks"
        )
    block_level = _block_level(buddy_tree(num_ranks, min_cp_size), sync_ranks, pipeline_size)
    problem = make_problem(
        lengths,
        num_ranks,
        max_seqlen_per_rank,
        min_cp_size,
        cost or DEFAULT_COST,
        sequence_parallel_size,
    )
    if not problem.lengths.size:
        return Schedule(num_ranks, max_seqlen_per_rank, [], sequence_parallel_size)

    def seconds(microbatches: list[list[Group]]) -> float:
        one = Schedule(num_ranks, max_seqlen_per_rank, microbatches)
        return simulate(one, lengths, problem.cost, sync_ranks=sync_ranks, pipeline_size=pipeline_size).seconds

    plans = _search(problem, block_level, pipeline_size)
    options = [_lay_out(problem, plan, pipeline_size) for plan in plans]
    added = [_round_up(option, microbatch_multiple) for option in options]
    best = seconds(options[0]) if added[0] else plans[0].seconds
    options += _of_one_size(problem, lengths, max_seqlen_per_rank, best, pipeline_size, microbatch_multiple)
    chosen = min(options, key=seconds) if len(options) > 1 else options[0]
    return Schedule(num_ranks, max_seqlen_per_rank, chosen, sequence_parallel_size)


def estimated_seconds(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    max_seqlen_per_rank: int,
    *,
    cost: CostModel,
    min_cp_size: int = 1,
    sync_ranks: int = 1,
    pipeline_size: float = 1,
    sequence_parallel_size: int = 1,
) -> float:
    """Estimate the seconds of a step without a schedule.

    Arguments are those of :func:`schedule`, and so is the error for a sample that does not fit. ``pipeline_size`` may
    be a fraction: virtual stages divide the time in which a pipeline fills and drains. Schedules without a pipeline
    take longer: microbatches have fixed costs, and do not fill up exactly.
    """
    problem = make_problem(lengths, num_ranks, max_seqlen_per_rank, min_cp_size, cost, sequence_parallel_size)
    return _promising_limits(problem, pipeline_size, _block_level(problem.tree, sync_ranks, pipeline_size) > 0)[1]


def _of_one_size(
    problem: Problem,
    lengths: Sequence[int] | np.ndarray,
    max_seqlen_per_rank: int,
    seconds: float,
    pipeline_size: int,
    microbatch_multiple: int,
) -> list[list[list[Group]]]:
    """Schedule groups of one size each where that may be faster."""
    tree, found = problem.tree, []
    tokens, squares = float(problem.lengths.sum()), float(problem.lengths @ problem.lengths)
    cubes = float((problem.lengths.astype(np.float64) ** 3).sum())
    for level, size in enumerate(problem.sizes):
        if not tree.is_regular(level) or tree.num_ranks % size or not np.isfinite(problem.seconds[level, 0]):
            continue
        cost = problem.costs[level]
        shortest, longest = problem.seconds[level, [-1, 0]].tolist()
        fewest = float(problem.tokens[level].sum()) / problem.max_tokens  # microbatches
        # Each microbatch has cut tokens of its own.
        work = cost.seconds(squares, tokens, cubes * fewest) + cost.fixed * (fewest - 1)
        work *= size / tree.num_ranks
        # Short microbatches may fill and drain the pipeline.
        if max(work + (pipeline_size - 1) * shortest, pipeline_size * longest) < _WORTH_A_TRY * seconds:
            one = schedule_fixed_cp(
                lengths,
                tree.num_ranks,
                max_seqlen_per_rank,
                cp_size=size,
                cost=problem.cost,
                microbatch_multiple=microbatch_multiple,
                sequence_parallel_size=problem.sequence_parallel_size,
            )
            found.append(one.microbatches)
    return found


def _block_level(tree: BuddyTree, sync_ranks: int, pipeline_size: float) -> int:
    """Return the lowest level whose blocks consist of whole lockstep domains."""
    top = len(tree.levels) - 1
    if pipeline_size > 1:
        return top
    return next(i for i in range(top + 1) if tree.is_regular(i) and tree.size(i) % sync_ranks == 0)


def _search(problem: Problem, block_level: int, pipeline_size: int) -> list[GroupPlan]:
    """Return the best plan of the most promising limits, within the effort.

    A plan's seconds are an upper bound in a pipeline. There, the best plans without and with jobs filled up first are
    both returned, the better one first.
    """
    budget = max(2, min(_MOST_PLANS, _EFFORT // (len(problem.lengths) + problem.tree.num_ranks)))
    keeps_step = block_level > 0
    limits, least = _promising_limits(problem, pipeline_size, keeps_step)

    def best_of(some: list[float], fill: bool = False) -> GroupPlan:
        found = [build(problem, problem.levels_under(x), block_level, x, pipeline_size, fill) for x in some]
        return min(found, key=lambda plan: plan.seconds)

    first = budget if keeps_step else max(1, min(_TRIED, budget // 4))
    best = [best_of(limits[:first])]
    for limit in limits[first:_TRIED]:
        if best[0].seconds > _GOOD * least:
            best = [min(best[0], best_of([limit]), key=lambda plan: plan.seconds)]
    if budget >= 12:
        best.append(best_of(limits[:_STARTS_WITH_FILL], fill=True))
    best.sort(key=lambda plan: plan.seconds)
    return best if pipeline_size > 1 else best[:1]


def _promising_limits(problem: Problem, pipeline_size: float, keeps_step: bool) -> tuple[list[float], float]:
    """Return limits on a microbatch's seconds, most promising first.

    Also returns the estimated seconds of a step with the first. The estimate is the area (seconds times ranks of every
    sample, spread evenly), or the longest sample if that is more, plus the pipeline's bubble. In lockstep, neighbours
    of the longest sample waste some of its time.
    """
    limits = _ladder(problem)
    over = problem.over(limits)
    # Limits divide the movable samples, by length, into levels; all others are short enough for level 0.
    movable = max(1, int(over[0, -1]))
    seconds = problem.seconds[:, :movable]
    area = np.stack([size * problem.shared_seconds(i, slice(movable)) for i, size in enumerate(problem.sizes)])
    area[np.isinf(area)] = 0.0
    # summed[i, x]: the area at level i of the samples before x.
    summed = np.concatenate([np.zeros((len(area), 1)), np.cumsum(area, axis=1)], axis=1)
    still = problem.sizes[0] * float(problem.shared_seconds(0, slice(movable, None)).sum())
    left = np.full(len(limits), movable)
    spread, longest = np.full(len(limits), still), np.zeros(len(limits))
    for i in range(len(problem.sizes)):
        start = np.minimum(over[i], left)
        spread += summed[i, left] - summed[i, start]
        at_start = seconds[i, np.minimum(start, movable - 1)]
        np.maximum(longest, at_start, out=longest, where=start < left)
        left = start
    # Samples above the limit at every level go to the fastest one.
    most = int(left.max())
    fastest = problem.seconds[:, :most].argmin(axis=0)
    spread += np.concatenate([[0.0], np.cumsum(area[fastest, np.arange(most)])])[left]
    np.maximum(longest, problem.seconds[:, 0].min(), out=longest, where=left > 0)
    spread /= problem.tree.num_ranks
    ahead = np.maximum(spread, longest) + (pipeline_size - 1 + 0.1 * keeps_step) * longest
    ordered = sorted(zip(ahead.tolist(), limits, strict=True), key=lambda pair: (pair[0], -pair[1]))
    return [limit for _, limit in ordered], ordered[0][0]


def _ladder(problem: Problem) -> list[float]:
    """Return sensible limits on a microbatch's seconds, highest first."""
    lowest = max(0.03 * problem.mean_load, 6 * problem.cost.per_microbatch)
    limits = [max(4.0 * problem.mean_load, lowest)]
    while limits[-1] * 0.85 >= lowest:
        limits.append(limits[-1] * 0.85)
    return limits


def _lay_out(problem: Problem, plan: GroupPlan, pipeline_size: int) -> list[list[Group]]:
    """Assign ranks and microbatches to jobs, wide jobs first."""
    tree, ids = problem.tree, problem.order.tolist()
    done = [0] * tree.num_ranks  # microbatches of each rank so far
    microbatches: list[list[Group]] = []
    ranks_of: dict[tuple[int, int], tuple[int, ...]] = {}

    def put(start: int, stop: int, items: list[int], k: int) -> None:
        if k == len(microbatches):
            microbatches.append([])
        ranks = ranks_of.get((start, stop))
        if ranks is None:
            ranks = ranks_of[start, stop] = tuple(range(start, stop))
        microbatches[k].append(Group(ranks, tuple([ids[x] for x in items])))

    for (i, j), jobs in plan.wide.items():
        start, stop = tree.levels[i][j]
        before = done[start]
        for k, job in enumerate(jobs, before):
            put(start, stop, job.items, k)
        done[start:stop] = [before + len(jobs)] * (stop - start)
    leaf_starts = [start for start, _ in tree.levels[0]]
    leaf_stops = [stop for _, stop in tree.levels[0]]
    for j, stacked in enumerate(plan.shelves):
        start, stop = tree.levels[plan.block_level][j]
        first = j << plan.block_level
        for k, shelf in enumerate(_pipeline_order(stacked) if pipeline_size > 1 else stacked, done[start]):
            if plan.block_level == 0:  # a shelf is one job on the block: most of a dense schedule
                put(start, stop, shelf[0].items, k)
                continue
            taken = {job.start + x for job in shelf if job.level for x in range(problem.leaves[job.level])}
            gaps = (x for x in itertools.count() if x not in taken)
            for job in shelf:
                leaf = first + (job.start if job.level else next(gaps))
                put(leaf_starts[leaf], leaf_stops[leaf + problem.leaves[job.level] - 1], job.items, k)
    for groups in microbatches:
        groups.sort()
    return microbatches


def _pipeline_order(shelves: list[Shelf]) -> list[Shelf]:
    """Order shelves for a pipeline: short, long, short."""
    rising = sorted(shelves, key=lambda shelf: max([job.seconds for job in shelf]))
    return rising[::2] + rising[1::2][::-1]


def _round_up(microbatches: list[list[Group]], multiple: int) -> int:
    """Make the number of microbatches a multiple; return how many were added.

    Splits microbatches with most to split; the others stay empty.
    """
    before = len(microbatches)
    while len(microbatches) % multiple:
        k = max(range(len(microbatches)), key=lambda k: sum(len(g.sample_ids) > 1 for g in microbatches[k]))
        halves = [(group, (len(group.sample_ids) + 1) // 2) for group in microbatches[k]]
        microbatches[k] = [Group(group.ranks, group.sample_ids[:half]) for group, half in halves]
        rest = [Group(group.ranks, group.sample_ids[half:]) for group, half in halves if half < len(group.sample_ids)]
        microbatches.insert(k + 1, rest)
    return len(microbatches) - before
