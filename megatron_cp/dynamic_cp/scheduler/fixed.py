"""Packing with one CP size for all samples (static CP)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_cp.dynamic_cp.cost import DEFAULT_COST, CostModel
from megatron_cp.dynamic_cp.scheduler.binning import most_room
from megatron_cp.dynamic_cp.scheduler.problem import check_lengths, does_not_fit
from megatron_cp.dynamic_cp.types import Group, Schedule, padded_length, tokens_per_rank, usable_tokens


def smallest_cp_size(longest: int, num_ranks: int, max_seqlen_per_rank: int, sequence_parallel_size: int = 1) -> int:
    """Return the smallest divisor of ``num_ranks`` that holds ``longest`` tokens."""
    for size in range(1, num_ranks + 1):
        if num_ranks % size == 0 and padded_length(longest, size, sequence_parallel_size) <= size * max_seqlen_per_rank:
            return size
    raise does_not_fit("the longest sample", longest, num_ranks, max_seqlen_per_rank, sequence_parallel_size)


def schedule_fixed_cp(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    max_seqlen_per_rank: int,
    *,
    cp_size: int | None = None,
    balanced: bool = True,
    cost: CostModel | None = None,
    microbatch_multiple: int = 1,
    sequence_parallel_size: int = 1,
) -> Schedule:
    """Pack all samples into microbatches of one CP size.

    cp_size: must divide ``num_ranks``; None: the smallest that holds the longest sample.
    balanced: True equalizes the seconds of all microbatches ("dp_balanced") and places similar ones side by side; False
        packs samples in the given order until a microbatch is full, as plain packed data sets do.

    Other arguments and errors are those of :func:`megatron_cp.dynamic_cp.schedule`.
    """
    cost = cost or DEFAULT_COST
    ids = check_lengths(lengths)
    if not ids.size:
        return Schedule(num_ranks, max_seqlen_per_rank, [], sequence_parallel_size)
    longest = int(ids.max())
    if cp_size is None:
        cp_size = smallest_cp_size(longest, num_ranks, max_seqlen_per_rank, sequence_parallel_size)
    if cp_size < 1 or num_ranks % cp_size:
        raise ValueError(f"cp_size={cp_size}: must divide the number of ranks ({num_ranks})")
    tokens = tokens_per_rank(ids, cp_size, sequence_parallel_size, placement=cost.placement)
    usable = usable_tokens(max_seqlen_per_rank, sequence_parallel_size)
    if tokens.max() > usable:
        raise does_not_fit(f"sample {ids.argmax()}", longest, cp_size, max_seqlen_per_rank, sequence_parallel_size)
    replicas = num_ranks // cp_size
    step = replicas * microbatch_multiple
    bins = _level(ids, tokens, cost, cp_size, usable, step) if balanced else _in_order(tokens.tolist(), usable)
    blocks = [tuple(range(k * cp_size, (k + 1) * cp_size)) for k in range(replicas)]
    count = -(-len(bins) // step) * microbatch_multiple
    microbatches = [
        [Group(ranks, tuple(b)) for ranks, b in zip(blocks, bins[k * replicas : (k + 1) * replicas], strict=False) if b]
        for k in range(count)
    ]
    return Schedule(num_ranks, max_seqlen_per_rank, microbatches, sequence_parallel_size)


def _in_order(tokens: list[float], capacity: int) -> list[list[int]]:
    """Pack by next fit: close a bin when the next sample does not fit."""
    bins: list[list[int]] = []
    used: float = capacity
    for x, need in enumerate(tokens):
        if used + need > capacity:
            bins.append([])
            used = 0
        bins[-1].append(x)
        used += need
    return bins


def _level(
    ids: np.ndarray, tokens: np.ndarray, cost: CostModel, cp_size: int, capacity: int, step: int
) -> list[list[int]]:
    """Pack into few bins of similar seconds, a multiple of ``step``."""
    order = np.argsort(-ids, kind="stable")
    work = cost.added_seconds(ids, cp_size)[order].tolist()
    sizes = tokens[order].tolist()

    def pack(count: int) -> list[int]:
        return most_room(work, sizes, [0.0] * count, capacity)

    count = -(-_fewest_bins(tokens, capacity) // step) * step
    chosen = pack(count)
    too_few, more = count - step, step
    while -1 in chosen:
        too_few, count, more = count, count + more, 2 * more
        chosen = pack(count)
    while count - too_few > step:
        middle = too_few + (count - too_few) // (2 * step) * step
        attempt = pack(middle)
        if -1 in attempt:
            too_few = middle
        else:
            count, chosen = middle, attempt
    bins: list[list[int]] = [[] for _ in range(count)]
    seconds = [0.0] * count
    for x, k, share in zip(order.tolist(), chosen, work, strict=True):
        bins[k].append(x)
        seconds[k] += share
    return [bins[k] for k in sorted(range(count), key=lambda k: -seconds[k])]


def _fewest_bins(tokens: np.ndarray, capacity: int) -> int:
    """Return a lower bound of bins: k - 1 samples over 1/k of a bin share one at most."""
    by_size = [-(-int((k * tokens > capacity).sum()) // (k - 1)) for k in range(2, 9)]
    return max(1, -(-int(tokens.sum()) // capacity), *by_size)
