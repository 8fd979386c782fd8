"""Jobs: packed microbatches without ranks yet."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain

import numpy as np

from megatron_cp.dynamic_cp.scheduler.binning import best_fit, most_room
from megatron_cp.dynamic_cp.scheduler.gaps import Gaps
from megatron_cp.dynamic_cp.scheduler.problem import Problem
from megatron_cp.dynamic_cp.types import is_in_pieces

_JOBS_TO_FILL = 8


class Job:
    """Samples that run together at one level: positions, sums and seconds."""

    __slots__ = ("cubes", "items", "length", "level", "seconds", "squares", "start", "tokens")

    def __init__(
        self,
        problem: Problem,
        level: int,
        items: list[int],
        length: int,
        squares: int,
        tokens: float,
        cubes: float,
    ) -> None:
        self.level = level
        self.items = items
        self.length = length
        self.squares = squares
        self.cubes = cubes
        self.tokens = tokens  # of each rank
        self.start = -1  # first narrowest block within the shelf, once known
        self.seconds = problem.costs[level].seconds(squares, length, cubes)

    def seconds_with(self, problem: Problem, length: int) -> float:
        """Return the job's seconds with another sample of ``length`` tokens."""
        return problem.costs[self.level].seconds(
            self.squares + length * length, self.length + length, self.cubes + float(length) ** 3
        )

    def add(self, problem: Problem, item: int, seconds: float) -> None:
        """Add a sample, with which the job takes ``seconds``."""
        length = problem.length_list[item]
        self.items.append(item)
        self.length += length
        self.squares += length * length
        self.cubes += float(length) ** 3
        self.tokens += problem.tokens.item(self.level, item)
        self.seconds = seconds


Shelf = list[Job]


def jobs_of(problem: Problem, level: int, contents: list[list[int]]) -> list[Job]:
    """Build a job of ``level`` from each list of sample positions; none may be empty."""
    items = list(chain.from_iterable(contents))
    ends = np.cumsum([0, *map(len, contents)])
    s = problem.lengths[items]
    sums = np.zeros((2, len(items) + 1), dtype=np.int64)
    np.cumsum([s, s * s], axis=1, out=sums[:, 1:])
    length, squares = np.diff(sums[:, ends]).tolist()
    # Cubes exceed 64 bits, and tokens may be fractions.
    tokens = np.add.reduceat(problem.tokens[level, items], ends[:-1]).tolist() if items else []
    cubes = np.add.reduceat(s.astype(np.float64) ** 3, ends[:-1]).tolist() if items else []
    return [Job(problem, level, *each) for each in zip(contents, length, squares, tokens, cubes, strict=True)]


def wide_jobs(problem: Problem, level: np.ndarray, limit: float, fill: bool) -> list[Job]:
    """Pack samples above level 0 into jobs of at most ``limit`` seconds.

    fill: samples, also of level 0, may first use the free tokens of wider jobs (:func:`fill_up`). Returns the jobs,
    longest first.
    """
    jobs: list[Job] = []
    for i in np.unique(level if fill else level[level > 0])[::-1].tolist():
        members = np.flatnonzero(level == i)
        if fill and jobs:
            members = fill_up(problem, jobs, members, i)
        if i == 0 or not members.size:
            continue
        own = problem.seconds[i, members] - problem.costs[i].fixed
        longest = max(limit - problem.costs[i].fixed, float(own.max()))
        share = np.maximum(own / longest, problem.tokens[i, members] / problem.max_tokens)
        by_share = np.argsort(-share, kind="stable")
        jobs += jobs_of(problem, i, best_fit(members[by_share].tolist(), share[by_share].tolist(), 1.0))
    jobs.sort(key=lambda job: (-job.seconds, job.items[0]))
    return jobs


def fill_up(problem: Problem, jobs: list[Job], members: np.ndarray, level: int) -> np.ndarray:
    """Add samples to wider jobs with free tokens where that costs fewer rank-seconds.

    Longest samples first, compared with a job of the sample's own level. Helps if a microbatch's fixed costs or exposed
    communication are high. Considers a few jobs at a time. Returns the remaining samples.
    """
    waiting = sorted(jobs, key=lambda job: (job.tokens - problem.max_tokens) * problem.sizes[job.level], reverse=True)
    open_jobs = [waiting.pop() for _ in range(min(_JOBS_TO_FILL, len(waiting)))]
    least = int(problem.lengths[members[-1]])
    own = problem.shared_seconds(level, members) * problem.sizes[level]
    left = []
    for x, alone in zip(members.tolist(), own.tolist(), strict=True):
        s = problem.length_list[x]
        cheapest, taker, seconds = alone, None, 0.0
        for job in open_jobs:
            if job.tokens + problem.tokens.item(job.level, x) <= problem.max_tokens:
                after = job.seconds_with(problem, s)
                extra = (after - job.seconds) * problem.sizes[job.level]
                if extra < cheapest:
                    cheapest, taker, seconds = extra, job, after
        if taker is None:
            left.append(x)
            continue
        taker.add(problem, x, seconds)
        if (problem.max_tokens - taker.tokens) * problem.sizes[taker.level] < least:
            open_jobs.remove(taker)
            if waiting:
                open_jobs.append(waiting.pop())
    return np.array(left, dtype=np.int64)


def stack(problem: Problem, jobs: list[Job], leaves: int) -> tuple[list[Shelf], list[int]]:
    """Place jobs on shelves of ``leaves`` narrowest blocks by first fit.

    Returns the shelves, tallest first, and the free narrowest blocks of each. Each shelf's first job is the longest;
    each job's ``start`` is set. This is the first-fit-decreasing-height rule of strip packing (Coffman, Garey, Johnson
    and Tarjan 1980).
    """
    shelves: list[Shelf] = []
    gaps: list[Gaps] = []
    first_fit = [0] * len(problem.sizes)
    for job in jobs:
        width = problem.leaves[job.level]
        k = first_fit[job.level]
        while k < len(shelves):
            job.start = gaps[k].take(width)
            if job.start >= 0:
                break
            k += 1
        else:
            shelves.append([])
            gaps.append(Gaps(leaves))
            job.start = gaps[k].take(width)
        first_fit[job.level] = k
        shelves[k].append(job)
    return shelves, [one.free for one in gaps]


def top_up(problem: Problem, shelves: list[Shelf], short: np.ndarray) -> np.ndarray:
    """Fill jobs up to their shelf's height with the longest short samples that fit.

    short: positions of level-0 samples, longest first. Returns the remaining ones. A sample shorter than eight padding
    units of a job is not added there, because of its padding, if it has any.
    """
    count = len(short)
    following = list(range(count + 1))  # union-find: next remaining sample

    def available(k: int) -> int:
        while following[k] != k:
            following[k] = following[following[k]]
            k = following[k]
        return k

    positions, lengths = short.tolist(), problem.lengths[short].tolist()
    shorter = [-length for length in lengths]
    prices: dict[int, list[float]] = {}
    taken = []
    for shelf in shelves:
        height = shelf[0].seconds
        for job in shelf:
            slack = height - job.seconds
            if job.level == 0 or slack < 0.01 * height:
                continue
            size = problem.sizes[job.level]
            padded = not is_in_pieces(problem.cost.placement, size)
            unit = 2 * problem.sequence_parallel_size * size if padded else 1
            if job.level not in prices:
                long_enough = short[: bisect_right(shorter, -8 * unit if padded else 0)]
                prices[job.level] = (-problem.cost.added_seconds(problem.lengths[long_enough], size)).tolist()
            price, k = prices[job.level], 0
            while slack >= 0.01 * height:
                free = (problem.max_tokens - job.tokens) * size // unit * unit
                k = available(max(k, bisect_left(price, -slack), bisect_left(shorter, -free)))
                if k >= len(price):
                    break
                seconds = job.seconds_with(problem, lengths[k])
                if seconds > height:  # communication is exposed with this sample: try a shorter one
                    slack *= 0.7
                    k += 1
                    continue
                job.add(problem, positions[k], seconds)
                following[k] = k + 1
                taken.append(k)
                slack = height - seconds
    return np.delete(short, taken)


def spread_out(problem: Problem, left: list[int], leaves: int) -> list[list[list[int]]]:
    """Distribute level-0 samples over few microbatches of ``leaves`` ranks.

    Returns the microbatches' jobs, as lists of samples.
    """
    tokens = problem.tokens[0, left].tolist()
    bins = best_fit(left, tokens, problem.max_tokens)
    count = min(-(-len(bins) // leaves) * leaves, len(left))
    chosen = most_room(problem.seconds[0, left].tolist(), tokens, [0.0] * count, problem.max_tokens)
    if -1 not in chosen:  # nearly always: there are at least as many bins as needed
        bins = [[] for _ in range(count)]
        for x, k in zip(left, chosen, strict=True):
            bins[k].append(x)
    return [bins[k : k + leaves] for k in range(0, len(bins), leaves)]
