"""Layout of a pack in pieces instead of in zigzag. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_cp.attention.placement.planner import place
from megatron_cp.attention.sharding import Layout, RowSpan


@dataclass(frozen=True)
class PlacedLayout:
    """Documents of a pack, in pieces on ``size`` ranks of ``rows`` rows each.

    ``pieces`` has the spans of every rank, in row order; rows without a span are padding. Frozen and hashable, as a
    cache key of plans.
    """

    lengths: tuple[int, ...]
    pieces: tuple[tuple[RowSpan, ...], ...] = field(repr=False)
    rows: int

    is_dense = False

    @classmethod
    def balanced(cls, lengths: Sequence[int], size: int, multiple: int = 1) -> PlacedLayout:
        """Place documents with equal tokens and nearly equal causal work.

        Padding is at the end of each rank; ``rows`` are a multiple of ``multiple``.
        """
        rows = -(-sum(lengths) // (size * multiple)) * multiple
        return cls(tuple(lengths), tuple(_in_rows(sorted(pieces)) for pieces in place(lengths, size)), rows)

    @property
    def size(self) -> int:
        return len(self.pieces)

    def spans(self, rank: int) -> tuple[RowSpan, ...]:
        """Return the tokens on ``rank``, in row order."""
        return self.pieces[rank]

    def resized(self, size: int) -> PlacedLayout:
        """Return the layout of groups of neighbours, with their rows in rank order."""
        group = self.size // size
        joined = (
            tuple(
                span._replace(row=span.row + index * self.rows)
                for index, spans in enumerate(self.pieces[start : start + group])
                for span in spans
            )
            for start in range(0, self.size, group)
        )
        return PlacedLayout(self.lengths, tuple(joined), self.rows * group)

    def tokens(self, rank: int) -> np.ndarray:
        """Return each row's place in the unpadded pack, int64 [rows]; -1 for padding."""
        offsets = [0, *accumulate(self.lengths)]
        places = np.full(self.rows, -1, dtype=np.int64)
        for span in self.spans(rank):
            first = offsets[span.sequence] + span.position
            places[span.row : span.row + span.length] = np.arange(first, first + span.length)
        return places

    @functools.cached_property
    def most_spans(self) -> int:
        """Return the largest number of spans of a rank."""
        return max(map(len, self.pieces))

    def following(self, rank: int) -> np.ndarray:
        """Return where the token after each row's is, int64 [rows].

        It is one of this rank's ``rows``; from ``rows`` on, the first row of a span: of ``most_spans`` spans of every
        rank; and after these, nowhere: at the end of a document, and for padding.
        """
        nowhere = self.rows + self.size * self.most_spans
        found = np.full(self.rows, nowhere, dtype=np.int64)
        for span in self.spans(rank):
            stop = span.row + span.length
            found[span.row : stop - 1] = np.arange(span.row + 1, stop)
            found[stop - 1] = self._first_rows.get((span.sequence, span.position + span.length), nowhere)
        return found

    @functools.cached_property
    def _first_rows(self) -> dict[tuple[int, int], int]:
        """Sequence and position of each span -> its number in :meth:`following`."""
        return {
            (span.sequence, span.position): self.rows + rank * self.most_spans + index
            for rank, spans in enumerate(self.pieces)
            for index, span in enumerate(spans)
        }

    def shard(self, x: Any, rank: int) -> Any:
        """Return ``rank``'s rows of a pack [tokens, ...]; padding is 0.

        ``x``: a torch tensor or NumPy array without padding. Differentiable for tensors.
        """
        places = self.tokens(rank)
        rows = np.flatnonzero(places >= 0)
        if isinstance(x, np.ndarray):
            shard = np.zeros_like(x, shape=(self.rows, *x.shape[1:]))
            shard[rows] = x[places[rows]]
            return shard
        import torch

        at, taken = (torch.from_numpy(index).to(x.device) for index in (rows, places[rows]))
        return x.new_zeros((self.rows, *x.shape[1:])).index_copy(0, at, x.index_select(0, taken))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # a key of many look-ups a layer
        return hash((self.lengths, self.pieces, self.rows))


AnyLayout = Layout | PlacedLayout


def _in_rows(pieces: Sequence[tuple[int, int, int]]) -> tuple[RowSpan, ...]:
    """Give sorted pieces consecutive rows; those that touch join."""
    spans: list[RowSpan] = []
    row = 0
    for document, start, stop in pieces:
        last = spans[-1] if spans else None
        if last and last.sequence == document and last.position + last.length == start:
            spans[-1] = last._replace(length=last.length + stop - start)
        else:
            spans.append(RowSpan(row, stop - start, start, document))
        row += stop - start
    return tuple(spans)
