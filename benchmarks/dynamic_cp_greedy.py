"""Greedy rule of Megatron-LM's development branch (2026), reimplemented.

It fills one microbatch after another, with the cost s^2 / c. A baseline of the benchmark. The scheduler does not use
it.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.dynamic_cp.scheduler.problem import Problem
from megatron_cp.dynamic_cp.types import Group


def greedy_per_microbatch(problem: Problem) -> list[list[Group]]:
    """Return microbatches by the greedy rule.

    The problem's group sizes must double from level to level.
    The longest remaining sample opens each microbatch, on the fewest ranks that hold it. Its cost plus 5 % limits every
    group. Each further sample, longest first, joins a group or opens one, of any size that holds it, so that the
    largest group cost is smallest (ties: the smaller group). A sample that fits nowhere moves to the next microbatch.
    Idle ranks widen the smallest group. If that is impossible, all samples share one group of all ranks.
    """
    lengths, capacity, ranks = problem.length_list, problem.max_tokens, problem.tree.num_ranks
    sizes, ids = list(problem.sizes), problem.order.tolist()
    tokens = problem.tokens.T.tolist()  # [n][levels]
    needs_of = problem.tokens
    left = list(range(len(lengths)))
    microbatches = []
    while left:
        level = np.zeros(ranks, dtype=np.int64)
        size, load, used = np.ones(ranks), np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
        members: list[list[int]] = []
        free, highest, cap = ranks, 0.0, 1.05 * lengths[left[0]] * capacity
        waiting: list[int] = []
        for position, x in enumerate(left):
            square, k = float(lengths[x]) ** 2, len(members)
            fits = [i for i in range(len(sizes)) if tokens[x][i] <= capacity]
            best: tuple[float, int, float, int] | None = None
            if k:
                after = load[:k] + square / size[:k]
                room = used[:k] + needs_of[level[:k], x] <= capacity
                legal = np.flatnonzero((level[:k] >= fits[0]) & room & (after <= cap))
                if legal.size:
                    peak = np.maximum(after[legal], highest)
                    g = int(legal[np.lexsort((after[legal], size[legal], peak))[0]])
                    best = (max(highest, float(after[g])), int(level[g]), float(after[g]), g)
            for i in fits if members else fits[:1]:
                cost = square / sizes[i]
                option = (max(highest, cost), i, cost, k)
                if sizes[i] <= free and (cost <= cap or not members) and (best is None or option[:3] < best[:3]):
                    best = option
            if best is None:
                waiting.append(x)
                if not free and not (used[:k] + tokens[left[-1]][-1] <= capacity).any():
                    waiting += left[position + 1 :]
                    break
                continue
            _, i, load_after, g = best
            if g == k:
                members.append([])
                level[g], size[g] = i, sizes[i]
                free -= sizes[i]
            members[g].append(x)
            load[g] = load_after
            used[g] += tokens[x][i]
            highest = max(highest, load_after)
        while free:
            g = int(np.argmin(size[: len(members)]))
            if size[g] > free:
                members, waiting, total = [[]], [], 0
                level[0] = len(sizes) - 1
                for x in left:
                    fit = total + tokens[x][-1] <= capacity
                    total += tokens[x][-1] if fit else 0
                    (members[0] if fit else waiting).append(x)
                break
            free -= int(size[g])
            size[g] *= 2
            level[g] += 1
        groups, start = [], 0
        for g in sorted(range(len(members)), key=lambda g: -int(level[g])):
            stop = start + sizes[int(level[g])]
            groups.append(Group(tuple(range(start, stop)), tuple([ids[x] for x in members[g]])))
            start = stop
        microbatches.append(groups)
        left = waiting
    return microbatches
