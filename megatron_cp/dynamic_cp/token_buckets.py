"""Few numbers of tokens for all packs of a run. Pure.

A layer sees a pack as a number of tokens on its rank. Captured kernels (CUDA graphs) and compiled code exist once for
each such number. Packs are therefore padded at their end, to the next of a few numbers: the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_cp.dynamic_cp.analysis.report import rank_tokens
from megatron_cp.dynamic_cp.types import Schedule, in_buckets

# Batches are planned until there are so many batches and packs: buckets fitted to fewer pad other batches more.
_BATCHES, _PACKS = 32, 1000
_MOST_BATCHES = 128
_GRID = 1024  # numbers to choose from


@dataclass(frozen=True)
class BucketFit:
    """Buckets of a run, with figures of the batches they were fitted to.

    tokens: ascending numbers of tokens a rank. distinct: the packs' numbers of tokens without buckets. padding: tokens
    that the buckets add, over those without them.
    """

    tokens: tuple[int, ...]
    batches: int
    packs: int
    distinct: int
    padding: float

    def __str__(self) -> str:
        ends = " to ".join(str(each) for each in dict.fromkeys((self.tokens[0], self.tokens[-1])))
        return (
            f"packed shapes: {len(self.tokens)} numbers of tokens a rank ({ends}) instead of {self.distinct}, "
            f"{self.padding:.2%} more tokens, planned over {self.packs} packs of {self.batches} batches"
        )


def fit_to_batches(
    batches: Iterable[tuple[Schedule, Sequence[int]]], number: int, limit: int, *, placement: str, lockstep: bool
) -> BucketFit:
    """Fit at most ``number`` buckets to scheduled batches.

    Each batch comes with its samples' lengths. Takes as many batches as are needed for a good fit. ``limit``: most
    tokens of a rank. ``lockstep``: idle ranks run dummies, which are padded too.
    """
    tokens, ranks, packs, width = [], [], 0, 1
    for count, (schedule, lengths) in enumerate(batches, 1):
        found, sizes = rank_tokens(schedule, lengths, placement)
        width = schedule.sequence_parallel_size
        tokens.append(found)
        ranks.append(sizes)
        packs += len(sizes)
        idle = schedule.num_ranks * schedule.num_microbatches - int(sizes.sum())
        if lockstep and idle:
            tokens.append(np.array([2 * width]))
            ranks.append(np.array([idle]))
        if count == _MOST_BATCHES or (count >= _BATCHES and packs >= _PACKS):
            break
    whole, weights = np.concatenate(tokens), np.concatenate(ranks)
    buckets = fit_buckets(whole, weights, number, limit, 2 * width)
    padding = float(weights @ in_buckets(whole, buckets)) / float(weights @ whole) - 1
    return BucketFit(buckets, count, packs, len(np.unique(whole)), padding)


def fit_buckets(tokens: ArrayLike, weights: ArrayLike, number: int, limit: int, unit: int) -> tuple[int, ...]:
    """Return at most ``number`` buckets that pad ``tokens`` least, ascending.

    The last one is ``limit``, rounded down to a multiple of ``unit``: every pack has a bucket. The others are multiples
    of ``unit``, and of about a 1,024th of ``limit``.

    This is the grouping of ordered values into contiguous classes (Fisher 1958; for quantizers, Bruce 1965). In an
    optimal grouping of j values, let the last class start at value i. Then the other classes are an optimal grouping
    of the values before i. So a table over j, filled once for each bucket, finds the optimum: O(number * values^2),
    with at most 1,024 values.
    """
    most = limit // unit * unit
    step = -(-limit // (_GRID * unit)) * unit
    rounded = np.minimum(-(-np.asarray(tokens) // step) * step, most)
    values, places = np.unique(np.append(rounded, most), return_inverse=True)
    if len(values) <= number:
        return tuple(values.tolist())
    mass = np.concatenate([[0.0], np.cumsum(np.bincount(places, np.append(weights, 0)))])
    count = np.arange(len(values))
    # costs[j, i]: padded tokens of the values i to j in the bucket of value j.
    costs = values[:, None] * (mass[1:, None] - mass[None, :-1])
    costs[count[:, None] < count[None, :]] = np.inf
    best, cuts = costs[:, 0], [np.zeros(len(values), dtype=np.int64)]
    for _ in range(number - 1):
        # With one more bucket: values before i have the buckets found so far.
        candidates = costs + np.append(0.0, best[:-1])
        cuts.append(candidates.argmin(axis=1))
        best = candidates.min(axis=1)
    buckets, j = [], len(values) - 1
    while j >= 0:
        buckets.append(int(values[j]))
        j = int(cuts.pop()[j]) - 1
    return tuple(reversed(buckets))
