"""The scheduling problem in the form that the algorithms share: what each sample costs and takes at each level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_cp.dynamic_cp.buddy_tree import BuddyTree, buddy_tree
from megatron_cp.dynamic_cp.cost import CostModel, GroupCost
from megatron_cp.dynamic_cp.types import padded_length


@dataclass(frozen=True)
class Problem:
    """Samples, ranks and costs. A group of level i has ``sizes[i]`` ranks, in ``leaves[i]`` narrowest blocks.

    order: sample ids, longest first (ties by id). Arrays indexed by position in that order:
    lengths [n]; seconds [levels, n], a sample alone in a microbatch, inf where it does not fit;
    tokens [levels, n], padded tokens a rank holds.
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
        """Seconds of samples at ``level`` if they and others filled the microbatch: its fixed seconds go by tokens."""
        empty = 1.0 - np.minimum(1.0, self.tokens[level, which] / self.max_tokens)
        return self.seconds[level, which] - self.costs[level].fixed * empty

    def over(self, limits: ArrayLike) -> np.ndarray:
        """How many samples take more than each of ``limits`` seconds: the longest ones. [levels, limits]"""
        return np.stack([np.searchsorted(-row, -np.asarray(limits)) for row in self.seconds])

    def levels_under(self, limit: float) -> np.ndarray:
        """For each sample the narrowest level that takes at most ``limit`` seconds, or else the fastest one. [n]"""
        level = np.empty(len(self.lengths), dtype=np.int64)
        left = len(level)  # the samples that no narrower level takes
        for i, over in enumerate(self.over([limit])[:, 0].tolist()):
            level[over:left] = i
            left = min(left, over)
        level[:left] = self.seconds[:, :left].argmin(axis=0)
        return level

    def seconds_on(self, num_ranks: int, items: list[int]) -> float:
        """Seconds of the samples at positions ``items`` in one microbatch on ``num_ranks``; inf if they do not fit."""
        s = self.lengths[items]
        per_rank = 2 * self.sequence_parallel_size
        if int((-(-s // (num_ranks * per_rank))).sum()) * per_rank > self.max_tokens:
            return float("inf")
        return self.cost.for_size(num_ranks).seconds(float(s @ s), float(s.sum()))

    @property
    def mean_load(self) -> float:
        """Seconds a rank would work if the bare work were spread evenly."""
        return self.cost.ideal_seconds(self.lengths) / self.tree.num_ranks


def check_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """The lengths as int64 [n]. Raises ValueError for anything but positive whole numbers."""
    ids = np.asarray(lengths)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"lengths: must be one list of whole numbers, got shape {ids.shape} of {ids.dtype}")
    if ids.size and ids.min() < 1:
        worst = int(ids.argmin())
        raise ValueError(f"sample {worst} has length {ids[worst]}: a sample must have at least one token")
    return ids.astype(np.int64)


class TooLongError(ValueError):
    """A sample that the ranks cannot hold."""


def does_not_fit(
    what: str, length: int, num_ranks: int, max_seqlen_per_rank: int, sequence_parallel_size: int
) -> TooLongError:
    """The error for a sample that ``num_ranks`` ranks cannot hold in one microbatch."""
    padded = padded_length(length, num_ranks, sequence_parallel_size)
    return TooLongError(
        f"{what} of {length} tokens does not fit: {num_ranks} ranks of max_seqlen_per_rank={max_seqlen_per_rank} hold "
        f"{num_ranks * max_seqlen_per_rank} tokens and it takes {padded} with padding. Set max_seqlen_per_rank to at "
        f"least {padded // num_ranks}, use more ranks, or cut the sample"
    )


def make_problem(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    max_seqlen_per_rank: int,
    min_cp_size: int,
    cost: CostModel,
    sequence_parallel_size: int,
) -> Problem:
    """Check the lengths and tabulate the input. Raises ValueError naming the sample or the setting at fault."""
    tree = buddy_tree(num_ranks, min_cp_size)
    ids = check_lengths(lengths)
    order = np.argsort(-ids, kind="stable")
    s = ids[order]
    sizes = tuple(tree.size(i) for i in range(len(tree.levels)))
    leaves = tuple(min(1 << i, len(tree.levels[0])) for i in range(len(tree.levels)))
    units = np.array(sizes)[:, None] * (2 * sequence_parallel_size)
    tokens = -(-s[None, :] // units) * (2 * sequence_parallel_size)
    seconds = np.stack([cost.sample_seconds(s, size) for size in sizes])
    seconds[tokens > max_seqlen_per_rank] = np.inf
    if s.size and not np.isfinite(seconds[-1, 0]):
        raise does_not_fit(f"sample {order[0]}", int(s[0]), num_ranks, max_seqlen_per_rank, sequence_parallel_size)
    costs = tuple(cost.for_size(size) for size in sizes)
    return Problem(
        tree,
        sizes,
        leaves,
        costs,
        cost,
        max_seqlen_per_rank,
        sequence_parallel_size,
        order,
        s,
        seconds,
        tokens,
        s.tolist(),
    )
