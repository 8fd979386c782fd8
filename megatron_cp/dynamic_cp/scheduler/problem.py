"""Input of the scheduling algorithms, tabulated by sample and level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_cp.dynamic_cp.buddy_tree import BuddyTree, buddy_tree
from megatron_cp.dynamic_cp.cost import CostModel, GroupCost
from megatron_cp.dynamic_cp.types import padded_length, tokens_per_rank, usable_tokens


@dataclass(frozen=True)
class Problem:
    """Samples, ranks and costs. A group of level i has ``sizes[i]`` ranks.

    leaves: narrowest blocks of such a group. order: sample ids, longest first (ties by id). Arrays by position in that
    order: lengths [n]; seconds [levels, n] of a sample alone in a microbatch, inf if it does not fit; tokens
    [levels, n], of each rank: padded, or fractions for packs in pieces.
    """

    tree: BuddyTree
    sizes: tuple[int, ...]
    leaves: tuple[int, ...]
    costs: tuple[GroupCost, ...]
    cost: CostModel
    max_tokens: int
    sequence_parallel_size: int
    order: np.ndarray
    lengths: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray
    length_list: list[int]

    def shared_seconds(self, level: int, which: np.ndarray | slice) -> np.ndarray:
        """Return seconds of samples in full microbatches, sharing fixed seconds."""
        empty = 1.0 - np.minimum(1.0, self.tokens[level, which] / self.max_tokens)
        return self.seconds[level, which] - self.costs[level].fixed * empty

    def over(self, limits: ArrayLike) -> np.ndarray:
        """Count the samples above each of ``limits`` seconds, by level: [levels, limits]."""
        return np.stack([np.searchsorted(-row, -np.asarray(limits)) for row in self.seconds])

    def levels_under(self, limit: float) -> np.ndarray:
        """Return each sample's narrowest level within ``limit``, else the fastest."""
        level = np.empty(len(self.lengths), dtype=np.int64)
        left = len(level)  # samples above the limit at all narrower levels
        for i, over in enumerate(self.over([limit])[:, 0].tolist()):
            level[over:left] = i
            left = min(left, over)
        level[:left] = self.seconds[:, :left].argmin(axis=0)
        return level

    def seconds_on(self, num_ranks: int, items: list[int]) -> float:
        """Return seconds of ``items`` in one microbatch; inf if they do not fit."""
        s = self.lengths[items]
        tokens = tokens_per_rank(s, num_ranks, self.sequence_parallel_size, placement=self.cost.placement)
        if tokens.sum() > self.max_tokens:
            return float("inf")
        cubes = float((s.astype(np.float64) ** 3).sum())
        return self.cost.for_size(num_ranks).seconds(float(s @ s), float(s.sum()), cubes)

    @property
    def mean_load(self) -> float:
        """Seconds of a rank if bare work is spread evenly."""
        return self.cost.ideal_seconds(self.lengths) / self.tree.num_ranks


def check_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the lengths as int64 [n]; raise ValueError for other values."""
    ids = np.asarray(lengths)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"lengths: must be one list of whole numbers, got shape {ids.shape} of {ids.dtype}")
    if ids.size and ids.min() < 1:
        worst = int(ids.argmin())
        raise ValueError(f"sample {worst} has length {ids[worst]}: a sample must have at least one token")
    return ids.astype(np.int64)


class TooLongError(ValueError):
    """Sample too long for the ranks."""


def does_not_fit(
    what: str, length: int, num_ranks: int, max_seqlen_per_rank: int, sequence_parallel_size: int
) -> TooLongError:
    """Build the error for a sample that ``num_ranks`` ranks cannot hold."""
    padded = padded_length(length, num_ranks, sequence_parallel_size)
    return TooLongError(
        f"{what} of {length} tokens does not fit: {num_ranks} ranks of max_seqlen_per_rank={max_seqlen_per_rank} hold "
        f"{num_ranks * max_seqlen_per_rank} tokens, and the sample has {padded} with padding. Fix: max_seqlen_per_rank "
        f"of at least {padded // num_ranks}, more ranks, or a shorter sample"
    )


def make_problem(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    max_seqlen_per_rank: int,
    min_cp_size: int,
    cost: CostModel,
    sequence_parallel_size: int,
) -> Problem:
    """Check the input and compute tables; raises ValueError."""
    tree = buddy_tree(num_ranks, min_cp_size)
    ids = check_lengths(lengths)
    order = np.argsort(-ids, kind="stable")
    s = ids[order]
    sizes = tuple(tree.size(i) for i in range(len(tree.levels)))
    leaves = tuple(min(1 << i, len(tree.levels[0])) for i in range(len(tree.levels)))
    tokens = np.stack([tokens_per_rank(s, size, sequence_parallel_size, placement=cost.placement) for size in sizes])
    seconds = np.stack([cost.sample_seconds(s, size) for size in sizes])
    usable = usable_tokens(max_seqlen_per_rank, sequence_parallel_size)
    seconds[tokens > usable] = np.inf
    if s.size and not np.isfinite(seconds[-1, 0]):
        raise does_not_fit(f"sample {order[0]}", int(s[0]), num_ranks, max_seqlen_per_rank, sequence_parallel_size)
    costs = tuple(cost.for_size(size) for size in sizes)
    return Problem(
        tree,
        sizes,
        leaves,
        costs,
        cost,
        usable,
        sequence_parallel_size,
        order,
        s,
        seconds,
        tokens,
        s.tolist(),
    )
