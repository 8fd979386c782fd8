"""Schedules: which ranks run which samples in which microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Group(NamedTuple):
    """One packed microbatch on one context parallel group.

    ranks: consecutive ranks of the data-and-context-parallel domain; their number is the CP size.
    sample_ids: indices into the scheduled lengths, in packing order.
    """

    ranks: tuple[int, ...]
    sample_ids: tuple[int, ...]

    @property
    def cp_size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Schedule:
    """One optimizer step: a list of groups for each microbatch.

    ``microbatches[k]`` lists microbatch k's groups, disjoint and in rank order. Every rank runs its groups in the order
    of the microbatches. A rank in no group of microbatch k is idle: in lockstep (pipeline stages, expert parallelism)
    it runs a dummy microbatch, otherwise it may continue with the next one.

    ``token_buckets``: ascending numbers of tokens a rank that packs are padded to; empty: no padding to buckets.
    """

    num_ranks: int
    max_seqlen_per_rank: int
    microbatches: list[list[Group]]
    sequence_parallel_size: int = 1
    token_buckets: tuple[int, ...] = ()

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches)

    def idle_slots(self) -> list[tuple[int, ...]]:
        """Return the idle ranks of each microbatch, ascending."""
        idle = []
        for groups in self.microbatches:
            busy = {rank for group in groups for rank in group.ranks}
            idle.append(tuple(rank for rank in range(self.num_ranks) if rank not in busy))
        return idle

    def groups_of(self, rank: int) -> list[Group | None]:
        """Return the group of ``rank`` in each microbatch; None if idle."""
        return [next((g for g in groups if g.ranks[0] <= rank <= g.ranks[-1]), None) for groups in self.microbatches]


def as_arrays(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Convert the groups to arrays.

    Returns one row a group: microbatch, first rank, ranks, samples [groups, 4]; and all sample ids in order [n].
    """
    rows = [
        (k, group.ranks[0], group.cp_size, len(group.sample_ids))
        for k, groups in enumerate(schedule.microbatches)
        for group in groups
    ]
    ids = chain.from_iterable([group.sample_ids for groups in schedule.microbatches for group in groups])
    return np.array(rows, dtype=np.int64).reshape(-1, 4), np.fromiter(ids, dtype=np.int64)


def is_in_pieces(placement: str, cp_size: int) -> bool:
    """Return whether a pack's documents are kept whole where possible.

    ``placement``: as ``model.packed_placement``.
    """
    return placement == "balanced" and cp_size > 1


def padded_length(length: int, cp_size: int, sequence_parallel_size: int = 1) -> int:
    """Return the padded tokens of a sample of ``length`` on ``cp_size`` ranks.

    A multiple of 2 * cp_size, so that each rank gets an early and a late chunk of equal size. With sequence parallelism
    also of the tensor parallel size, which splits a rank's tokens again (``sequence_parallel_size``, else 1).
    """
    unit = 2 * cp_size * sequence_parallel_size
    return -(-length // unit) * unit


def padded_tokens(
    lengths: Sequence[int],
    cp_size: int,
    sequence_parallel_size: int = 1,
    *,
    placement: str,
    token_buckets: Sequence[int] = (),
) -> int:
    """Return the padded tokens of a pack of samples of ``lengths``.

    Samples are padded one by one, but under the placement ``balanced`` on several ranks only the ranks are. At last the
    ranks are padded to ``token_buckets``.
    """
    if is_in_pieces(placement, cp_size):
        unit = cp_size * sequence_parallel_size
        total = -(-sum(lengths) // unit) * unit
    else:
        total = sum(padded_length(length, cp_size, sequence_parallel_size) for length in lengths)
    return int(in_buckets(total // cp_size, token_buckets)) * cp_size


def in_buckets(tokens: ArrayLike, token_buckets: Sequence[int]) -> np.ndarray:
    """Return the smallest bucket that holds each number of tokens.

    Without buckets, the numbers themselves. Raises ValueError for more tokens than the last bucket.
    """
    whole = np.asarray(tokens)
    if not token_buckets:
        return whole
    if whole.size and whole.max() > token_buckets[-1]:
        raise ValueError(f"a pack has {whole.max()} tokens a rank, more than the largest bucket ({token_buckets[-1]})")
    return np.asarray(token_buckets)[np.searchsorted(token_buckets, whole)]


def tokens_per_rank(
    lengths: np.ndarray, cp_size: int, sequence_parallel_size: int = 1, *, placement: str
) -> np.ndarray:
    """Return each sample's share of a rank's limit of tokens, shaped as ``lengths``.

    With padding if samples are padded one by one. Otherwise the shares are fractions, and :func:`usable_tokens` bounds
    their sum.
    """
    if is_in_pieces(placement, cp_size):
        return lengths / cp_size
    unit = 2 * sequence_parallel_size
    return -(-lengths // (cp_size * unit)) * unit


def usable_tokens(max_seqlen_per_rank: int, sequence_parallel_size: int) -> int:
    """Return the largest number of tokens of a rank that padding does not increase."""
    unit = 2 * sequence_parallel_size
    return max_seqlen_per_rank // unit * unit
