"""What the dynamic CP scheduler is compared with: two published greedy schedulers, and a lower bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_cp.dynamic_cp import CostModel, Group, Schedule


def greedy_per_microbatch(lengths: np.ndarray, num_ranks: int, max_seqlen_per_rank: int) -> Schedule:
    """Our re-statement of the packing-aware greedy rule on Megatron-LM's development branch (2026). Power-of-two ranks.

    A sample's cost is s^2 / c. Each microbatch is opened by the longest sample left, on the fewest ranks that hold it;
    its cost and 5 % is the cap of every group. Each further sample, longest first, is added to a group or opens one, of
    any size that holds it, wherever the largest group cost stays smallest (ties: the smaller group). What fits nowhere
    waits for the next microbatch. Idle ranks widen the smallest group, or else all samples share one group.
    """
    sizes = [1 << i for i in range(num_ranks.bit_length())]
    m = max_seqlen_per_rank
    left = np.argsort(-lengths, kind="stable").tolist()
    microbatches = []
    while left:
        size, load, used = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64)
        members: list[list[int]] = []
        free, highest, cap, waiting = num_ranks, 0.0, 1.05 * float(lengths[left[0]]) * m, []
        for position, x in enumerate(left):
            s = int(lengths[x])
            fits = [c for c in sizes if -(-s // (2 * c)) * 2 <= m]
            k = len(members)
            best: tuple[float, int, float, int] | None = None
            if k:
                needs = -(-s // (2 * size[:k])) * 2
                after = load[:k] + s * s / size[:k]
                legal = np.flatnonzero((size[:k] >= fits[0]) & (used[:k] + needs <= m) & (after <= cap))
                if legal.size:
                    peak = np.maximum(after[legal], highest)
                    g = int(legal[np.lexsort((after[legal], size[legal], peak))[0]])
                    best = (max(highest, float(after[g])), int(size[g]), float(after[g]), g)
            for c in fits if members else fits[:1]:
                option = (max(highest, s * s / c), c, s * s / c, k)
                if c <= free and (s * s / c <= cap or not members) and (best is None or option[:3] < best[:3]):
                    best = option
            if best is None:
                waiting.append(x)
                if not free and not (used[:k] + 2 <= m).any():
                    waiting += left[position + 1 :]
                    break
                continue
            _, c, after_load, g = best
            if g == k:
                members.append([])
                size[g] = c
                free -= c
            members[g].append(x)
            load[g] = after_load
            used[g] += -(-s // (2 * c)) * 2
            highest = max(highest, after_load)
        while free:
            g = int(np.argmin(size[: len(members)]))
            if size[g] > free:
                members, size = [left[:1]], np.array([num_ranks])
                total = -(-int(lengths[left[0]]) // (2 * num_ranks)) * 2
                waiting = []
                for x in left[1:]:
                    need = -(-int(lengths[x]) // (2 * num_ranks)) * 2
                    if total + need <= m:
                        members[0].append(x)
                        total += need
                    else:
                        waiting.append(x)
                break
            free -= int(size[g])
            size[g] *= 2
        groups, start = [], 0
        for g in sorted(range(len(members)), key=lambda g: -size[g]):
            groups.append(Group(tuple(range(start, start + int(size[g]))), tuple(members[g])))
            start += int(size[g])
        microbatches.append(groups)
        left = waiting
    return Schedule(num_ranks, m, microbatches)


def shipped_scheduler(num_ranks: int, max_seqlen_per_rank: int) -> Any:
    """megatron-core 0.19's own BalancedCPScheduler, without process groups."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Ranks:
        def size(self) -> int:
            return num_ranks

    return BalancedCPScheduler(max_seqlen_per_rank, Ranks())


def shipped_seconds(assignment: list[list[list[int]]], lengths: np.ndarray, cost: CostModel) -> float:
    """Seconds of a step as megatron-core 0.19 runs it: each sample on its own, a barrier after each round."""
    total = 0.0
    for round_ in assignment:
        holders: dict[int, int] = {}
        for samples in round_:
            for x in samples:
                holders[x] = holders.get(x, 0) + 1
        total += max(sum(cost.seconds([int(lengths[x])], holders[x]) for x in samples) for samples in round_)
    return total


def lower_bound(lengths: np.ndarray, num_ranks: int, max_seqlen_per_rank: int, cost: CostModel) -> float:
    """Seconds that no schedule can beat: the larger of the work spread evenly and the dearest sample.

    The work is attention at the smallest CP size a sample fits (short tiles included), the linear part, and what the
    fewest possible microbatches cost; communication is taken as free. The dearest sample runs on its best CP size.
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
