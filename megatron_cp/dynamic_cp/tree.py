"""Balance each rank's total time over the step: longest processing time first, down the buddy tree, widest groups first.

Dense data parallel ranks meet only at the optimizer step, so what counts is each rank's sum, not each microbatch.
Groups are nested or disjoint, and a rank runs its widest group first: all members of a group then have the same
history, and nobody waits before the end of the step. Within a level this is Graham's LPT rule (1969) on loads
inherited from above; within a block samples are packed by best-fit decreasing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

from megatron_cp.dynamic_cp.problem import Problem

# A node is (start, stop) in ranks; a bin is the list of positions (into Problem.order) that one microbatch packs.
Bin = list[int]
Placement = list[tuple[tuple[int, int], list[Bin]]]


def pack(items: list[int], tokens: list[int], capacity: int) -> list[Bin]:
    """Best-fit decreasing: ``items`` come largest first; no bin takes more than ``capacity`` tokens."""
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []
    for x in items:
        need = tokens[x]
        k = bisect_left(room, (need, -1))
        if k == len(room):
            insort(room, (capacity - need, len(bins)))
            bins.append([x])
        else:
            left, b = room.pop(k)
            bins[b].append(x)
            insort(room, (left - need, b))
    return bins


def balance(problem: Problem, level: np.ndarray) -> tuple[float, Placement]:
    """Place every sample on a block of its ``level``. Returns the slowest rank's seconds and the placement.

    The placement lists the blocks that got samples, widest first, with the microbatches each of them runs.
    """
    tree, capacity = problem.tree, problem.max_tokens
    squares = (problem.lengths * problem.lengths).tolist()
    lengths = problem.lengths.tolist()
    placement: Placement = []
    loads = [0.0]
    for i in range(len(tree.levels) - 1, -1, -1):
        blocks = tree.levels[i]
        if len(blocks) > len(loads):
            loads = [loads[j // 2] for j in range(len(blocks))]
        members = np.flatnonzero(level == i)
        if not members.size:
            continue
        cost, tokens = problem.costs[i], problem.tokens[i].tolist()
        # A packed sample pays only its share of what a microbatch costs whatever it holds.
        share = np.minimum(1.0, problem.tokens[i, members] / capacity)
        weight = (problem.seconds[i, members] - cost.fixed * (1.0 - share)).tolist()
        regular = len(blocks) if tree.tail_size(i) == tree.size(i) else len(blocks) - 1
        heap = [(load, j) for j, load in enumerate(loads[:regular])]
        heapq.heapify(heap)
        contents: dict[int, Bin] = {}
        for x, seconds in zip(members.tolist(), weight, strict=True):
            load, j = heap[0]
            heapq.heapreplace(heap, (load + seconds, j))
            if j in contents:
                contents[j].append(x)
            else:
                contents[j] = [x]
        for j, items in contents.items():
            bins = pack(items, tokens, capacity)
            for b in bins:
                loads[j] += cost.seconds(sum([squares[x] for x in b]), sum([lengths[x] for x in b]))
            placement.append((blocks[j], bins))
    return max(loads), placement
