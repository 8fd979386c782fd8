"""Jobs: packed microbatches in the making, before they have ranks."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from megatron_cp.dynamic_cp.binning import best_fit
from megatron_cp.dynamic_cp.problem import Problem


class Job:
    """Samples that run together on a group of one level's size: their positions, their sums, and the seconds."""

    __slots__ = ("items", "length", "level", "seconds", "squares", "tokens")

    def __init__(self, problem: Problem, level: int, items: list[int]) -> None:
        lengths = problem.length_list
        self.level = level
        self.items = items
        self.length = sum([lengths[x] for x in items])
        self.squares = sum([lengths[x] * lengths[x] for x in items])
        self.tokens = 0  # padded, per rank; kept where samples may be added
        self.seconds = problem.costs[level].seconds(self.squares, self.length)


Shelf = list[Job]


def wide_jobs(problem: Problem, level: np.ndarray, limit: float) -> list[Job]:
    """Pack the samples above level 0, each at its level, into jobs of at most ``limit`` seconds where possible.

    Returns the jobs, longest first.
    """
    jobs = []
    for i in np.unique(level[level > 0]).tolist():
        members = np.flatnonzero(level == i)
        own = problem.seconds[i, members] - problem.costs[i].fixed
        longest = max(limit - problem.costs[i].fixed, float(own.max()))
        share = np.maximum(own / longest, problem.tokens[i, members] / problem.max_tokens)
        by_share = np.argsort(-share, kind="stable")
        tokens = problem.tokens[i].tolist()
        for items in best_fit(members[by_share].tolist(), share[by_share].tolist(), 1.0):
            job = Job(problem, i, items)
            job.tokens = sum([tokens[x] for x in items])
            jobs.append(job)
    jobs.sort(key=lambda job: (-job.seconds, job.items[0]))
    return jobs


def stack(problem: Problem, jobs: list[Job], leaves: int) -> tuple[list[Shelf], list[int]]:
    """Put jobs, longest first, side by side on shelves of ``leaves`` narrowest blocks: first fit.

    Returns the shelves, tallest first, and how many narrowest blocks each has free. Each shelf's first job is its
    longest. (The first-fit-decreasing-height rule of strip packing: Coffman, Garey, Johnson and Tarjan 1980.)
    """
    widths = [min(1 << i, leaves) for i in range(len(problem.sizes))]
    shelves: list[Shelf] = []
    free: list[int] = []
    first_fit = [0] * len(widths)
    for job in jobs:
        width = widths[job.level]
        k = first_fit[job.level]
        while k < len(shelves) and free[k] < width:
            k += 1
        first_fit[job.level] = k
        if k == len(shelves):
            shelves.append([])
            free.append(leaves)
        shelves[k].append(job)
        free[k] -= width
    return shelves, free


def top_up(problem: Problem, shelves: list[Shelf], short: np.ndarray) -> np.ndarray:
    """Fill jobs up to the height of their shelf, each time with the longest short sample that still fits.

    short: positions of level-0 samples, longest first. Returns those that are left. A sample of less than eight padding
    units of a job is not worth its padding there.
    """
    count = len(short)
    following = list(range(count + 1))  # union-find: the next one that is still there

    def available(k: int) -> int:
        while following[k] != k:
            following[k] = following[following[k]]
            k = following[k]
        return k

    positions, lengths = short.tolist(), problem.lengths[short].tolist()
    prices: dict[int, list[float]] = {}
    for shelf in shelves:
        height = shelf[0].seconds
        for job in shelf:
            slack = height - job.seconds
            if job.level == 0 or slack < 0.01 * height:
                continue
            cost, unit = problem.costs[job.level], 2 * problem.sequence_parallel_size * problem.sizes[job.level]
            if job.level not in prices:
                prices[job.level] = (cost.fixed - problem.seconds[job.level, short]).tolist()
            price = prices[job.level]
            k = bisect_left(price, -slack)
            while slack >= 0.01 * height:
                k = available(k)
                if k == count or lengths[k] < 8 * unit:
                    break
                s = lengths[k]
                tokens = job.tokens + -(-s // unit) * unit // problem.sizes[job.level]
                seconds = cost.seconds(job.squares + s * s, job.length + s)
                if tokens > problem.max_tokens or seconds > height:
                    slack *= 0.7  # tokens bind, or communication that the job no longer hides: try a shorter one
                    k = max(k + 1, bisect_left(price, -slack))
                    continue
                job.items.append(positions[k])
                job.squares += s * s
                job.length += s
                job.tokens, job.seconds = tokens, seconds
                following[k] = k + 1
                slack = height - seconds
                k = max(k, bisect_left(price, -slack))
    return short[[k for k in range(count) if following[k] == k]]
