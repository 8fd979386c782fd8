"""Place jobs on the buddy tree so that all ranks are busy for the same time.

Ranks that synchronize in every microbatch (expert parallelism, pipeline, barrier) form a block. A microbatch of a block
takes as long as its slowest group, so groups of similar duration share a shelf. Blocks synchronize only at the end of
the step, so the sum of each block counts. A dense model's block is one narrowest group; a barrier's is all ranks.

1. Samples that need several ranks are packed into jobs. Jobs no wider than a block are placed on shelves, and filled up
   with short samples to the shelf's height.
2. Wider jobs and shelves are placed down the tree, widest first, each on the least loaded block of its level. All ranks
   of a group then have the same load before it, so none waits.
3. Short samples fill the rest, each where most time is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from megatron_cp.dynamic_cp.scheduler.binning import best_fit, least_loaded, most_room, water_level
from megatron_cp.dynamic_cp.scheduler.jobs import Job, Shelf, jobs_of, spread_out, stack, top_up, wide_jobs
from megatron_cp.dynamic_cp.scheduler.problem import Problem


@dataclass
class GroupPlan:
    """Jobs by block.

    ``wide[i, j]``: jobs of block j of level i, wider than lockstep blocks. ``shelves[j]``: shelves of lockstep block j.
    ``seconds``: total of the slowest block, with the pipeline's bubble.
    """

    block_level: int
    shelves: list[list[Shelf]] = field(default_factory=list)
    wide: dict[tuple[int, int], list[Job]] = field(default_factory=dict)
    seconds: float = 0.0


def build(
    problem: Problem, level: np.ndarray, block_level: int, limit: float, pipeline_size: int, fill: bool = False
) -> GroupPlan:
    """Build a plan with every sample at its ``level``, or wider in a gap.

    limit: seconds that a job should not exceed. fill: let wide jobs use their free tokens first.
    """
    tallest = 1.02
    while True:
        plan = GroupPlan(block_level)
        stuck = _build(problem, level, plan, limit, pipeline_size, tallest, fill)
        if not stuck.size:
            return plan
        level = level.copy()
        level[stuck] = 1
        tallest = max(0.5, tallest - 0.06)  # moves more samples at a time, for few attempts


def _build(
    problem: Problem, level: np.ndarray, plan: GroupPlan, limit: float, pipeline_size: int, tallest: float, fill: bool
) -> np.ndarray:
    """Fill ``plan``; return short samples that need more ranks."""
    tree = problem.tree
    leaves = min(1 << plan.block_level, len(tree.levels[0]))
    jobs = wide_jobs(problem, level, limit, fill)
    shelves, free = stack(problem, [job for job in jobs if problem.leaves[job.level] <= leaves], leaves)
    is_short = level == 0
    if fill:
        for job in jobs:
            is_short[job.items] = False
    short = np.flatnonzero(is_short)
    if shelves and short.size:
        short = top_up(problem, shelves, short)

    base, highest = _place_wide(problem, plan, [job for job in jobs if problem.leaves[job.level] > leaves])
    loads = list(base)
    plan.shelves = [[] for _ in loads]
    for shelf, j in zip(shelves, least_loaded([shelf[0].seconds for shelf in shelves], loads), strict=True):
        plan.shelves[j].append(shelf)
        loads[j] += shelf[0].seconds
        highest[j] = max(highest[j], shelf[0].seconds)

    if short.size and leaves == 1 and pipeline_size == 1:
        _fill_ranks(problem, plan, short, loads)
    elif short.size:
        rooms = [(shelf, number) for shelf, number in zip(shelves, free, strict=True) if number]
        stuck = _fill_shelves(problem, plan, rooms, short, loads, highest, limit, pipeline_size, tallest)
        if stuck.size:
            return stuck
    for j, stacked in enumerate(plan.shelves):
        heights = [max([job.seconds for job in shelf]) for shelf in stacked]
        bubble = (pipeline_size - 1) * max([highest[j], *heights]) if pipeline_size > 1 else 0.0
        plan.seconds = max(plan.seconds, base[j] + sum(heights) + bubble)
    return short[:0]


def _place_wide(problem: Problem, plan: GroupPlan, jobs: list[Job]) -> tuple[list[float], list[float]]:
    """Place jobs wider than a block; return each block's load and longest job."""
    tree = problem.tree
    loads, highest = [0.0], [0.0]
    for i in range(len(tree.levels) - 1, plan.block_level - 1, -1):
        count = len(tree.levels[i])
        if count > len(loads):
            loads = [loads[j // 2] for j in range(count)]
            highest = [highest[j // 2] for j in range(count)]
        here = [job for job in jobs if job.level == i]
        if not here:
            continue
        on_tail = None
        if tree.tail_size(i) != tree.size(i):
            on_tail = [problem.seconds_on(tree.tail_size(i), job.items) for job in here]
        for k, j in enumerate(least_loaded([job.seconds for job in here], loads, on_tail)):
            if on_tail and j == count - 1:
                here[k].seconds = on_tail[k]
            plan.wide.setdefault((i, j), []).append(here[k])
            loads[j] += here[k].seconds
            highest[j] = max(highest[j], here[k].seconds)
    return loads, highest


def _fill_ranks(problem: Problem, plan: GroupPlan, short: np.ndarray, loads: list[float]) -> None:
    """Fill ranks without lockstep (step 3): equal sums, then few jobs on each rank."""
    capacity, tokens = problem.max_tokens, problem.tokens[0].tolist()
    weights = problem.shared_seconds(0, short)
    contents: list[list[int]] = [[] for _ in loads]
    for x, j in zip(short.tolist(), least_loaded(weights.tolist(), loads), strict=True):
        contents[j].append(x)
    busy = [j for j, items in enumerate(contents) if items]
    for j, job in zip(busy, jobs_of(problem, 0, [contents[j] for j in busy]), strict=True):
        if job.tokens <= capacity:
            plan.shelves[j].append([job])
        else:
            bins = best_fit(job.items, [tokens[x] for x in job.items], capacity)
            plan.shelves[j] += [[one] for one in jobs_of(problem, 0, bins)]


def _fill_shelves(
    problem: Problem,
    plan: GroupPlan,
    rooms: list[tuple[Shelf, int]],
    short: np.ndarray,
    loads: list[float],
    highest: list[float],
    limit: float,
    pipeline_size: int,
    tallest: float,
) -> np.ndarray:
    """Fill shelves (step 3) with new shelves and short samples.

    rooms: shelves with free narrowest blocks, and their number. Returns the samples that take longer than ``tallest``
    times the highest shelf, if any exceed it.
    """
    leaves = min(1 << plan.block_level, len(problem.tree.levels[0]))
    fixed, capacity = problem.costs[0].fixed, problem.max_tokens
    work, tokens = problem.seconds[0, short] - fixed, problem.tokens[0, short]
    owners = [shelf for shelf, number in rooms for _ in range(number)]
    free = [shelf[0].seconds - fixed for shelf in owners]
    full = float(work.sum()) / float(tokens.sum()) * capacity  # seconds of work in an average full job
    for again in (False, True):
        volume = float(work.sum()) - sum([min(seconds, full) for seconds in free])
        height = max(min(limit - fixed, 0.995 * full), 0.02 * full)
        new: list[tuple[int, float]] = []
        if volume > 0 or not free:
            taken = [a + (pipeline_size - 1) * max(b, height) for a, b in zip(loads, highest, strict=True)]
            new = _new_shelves(taken, max(volume, 0.0) / leaves * (1 + fixed / height), height, fixed)
        wanted = free + [seconds for _, seconds in new for _ in range(leaves)]
        highest_wanted = max(wanted, default=0.0)
        if not again and len(problem.sizes) > 1 and (work > 1.02 * highest_wanted).any():
            quicker = problem.seconds[1, short] < problem.seconds[0, short]
            stuck = short[quicker & (work > tallest * highest_wanted)]
            if stuck.size:
                return stuck
        contents: list[list[int]] = [[] for _ in wanted]
        left: list[int] = []
        for x, k in zip(short.tolist(), most_room(work.tolist(), tokens.tolist(), wanted, capacity), strict=True):
            (contents[k] if k >= 0 else left).append(x)
        extra = spread_out(problem, left, leaves) if left else []
        if len(extra) <= len(loads):
            break
        # Jobs are full before their tokens are used up (by samples above half of them, say): count the jobs.
        full = min(full, float(work.sum()) / len(best_fit(short.tolist(), tokens.tolist(), capacity)))

    blocks = [j for j, _ in new for _ in range(leaves)]
    if left:  # tokens of the jobs do not suffice: more microbatches for the least loaded blocks
        alone = [max([job.seconds for job in jobs_of(problem, 0, bins)]) for bins in extra]
        totals = list(loads)
        for j, seconds in new:
            totals[j] += seconds + fixed
        for bins, j in zip(extra, least_loaded(alone, totals), strict=True):
            blocks += [j] * len(bins)
            contents += bins
    plain: list[list[Job]] = [[] for _ in loads]
    busy = [k for k, items in enumerate(contents) if items]
    for k, job in zip(busy, jobs_of(problem, 0, [contents[k] for k in busy]), strict=True):
        (owners[k] if k < len(owners) else plain[blocks[k - len(owners)]]).append(job)
    for stacked, jobs in zip(plan.shelves, plain, strict=True):
        alike = sorted(jobs, key=lambda job: -job.seconds)  # shelves of similar durations
        stacked += [alike[k : k + leaves] for k in range(0, len(alike), leaves)]
    return short[:0]


def _new_shelves(loads: list[float], volume: float, height: float, fixed: float) -> list[tuple[int, float]]:
    """Distribute ``volume`` seconds over blocks in shelves up to ``height``.

    Returns (block, target seconds of work of each job), one a shelf.
    """
    level = water_level(loads, volume)
    found = []
    for j, load in enumerate(loads):
        count = math.ceil((level - load) / (height + fixed) - 1e-6)
        if count > 0 and (level - load) / count >= 1.5 * fixed:
            found += [(j, (level - load) / count - fixed)] * count
    return found
