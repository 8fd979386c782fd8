"""What one launch of a kernel computes: a tile, or the tiles of many sequences one after the other.

A pack has a tile or more for each of its sequences. On a GPU to launch each of them alone may take longer than to
compute it, and its kernel takes many sequences at once. So tiles under the same mask go together; where their rows do
not lie one after the other as it is, an index collects them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attention.merge import Rows
from megatron_cp.attention.tables import on_device
from megatron_cp.attention.tiles import Tile, TilePlan

Window = tuple[int, int]

# Plans whose launches are kept, for the microbatches under way in a pipeline: a ring has one for each of its stops, and
# those of gathered keys are as many times larger.
KEPT, KEPT_GATHERED = 512, 16

# Rows that a kernel sets aside beside each sequence's own.
SPARE_ROWS = 128


@dataclass(frozen=True, eq=False)
class Lengths:
    """Spans that lie one after the other: where they end, int32 [spans + 1], and the length of the longest."""

    ends: Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class Launch:
    """Rows of the queries and of the keys, and the mask between them: the tile's, or with lengths that of each pair of
    spans, which is like the tile's. ``square``: the one or all of them are."""

    tile: Tile
    q_rows: Rows
    k_rows: Rows
    square: bool
    q_lengths: Lengths | None = None
    k_lengths: Lengths | None = None

    @classmethod
    def of(cls, tile: Tile) -> Launch:
        return cls(tile, tile.q_rows, tile.k_rows, tile.q_length == tile.k_length)

    @property
    def sequences(self) -> int | None:
        """How many spans; None for a tile alone."""
        return None if self.q_lengths is None else len(self.q_lengths.ends) - 1


def group_launches(
    plan: TilePlan, window_of: Callable[[Tile], Window], device: torch.device, room: int
) -> tuple[Launch, ...]:
    """The plan in as few launches as may be, as :func:`by_launch` has it; made once for all layers."""
    return (_kept_gathered if plan.gathered else _kept)(plan, window_of, device, room)


@torch.inference_mode(False)  # what is evaluated first may be trained on later
def _group_launches(
    plan: TilePlan, window_of: Callable[[Tile], Window], device: torch.device, room: int
) -> tuple[Launch, ...]:
    each = by_launch(plan, window_of, room)
    return tuple(Launch.of(tiles[0]) if len(tiles) == 1 else _of_many(tiles, device) for tiles in each)


_kept = functools.lru_cache(maxsize=KEPT)(_group_launches)
_kept_gathered = functools.lru_cache(maxsize=KEPT_GATHERED)(_group_launches)


def by_launch(tiles: Iterable[Tile], window_of: Callable[[Tile], Window], room: int) -> list[list[Tile]]:
    """The tiles of each launch: of one window (``window_of`` tells a kernel's limits of a tile), with rows and columns
    that rise from one to the next, and of at most ``room`` rows, spare ones included, unless it is one tile."""
    launches: dict[Window, list[list[Tile]]] = {}
    rows: dict[int, int] = {}  # of each launch, by its identity
    for tile in sorted(tiles, key=lambda tile: (tile.q_row, tile.k_row)):
        alike, needed = launches.setdefault(window_of(tile), []), tile.q_length + SPARE_ROWS
        for launch in alike:
            last = launch[-1]
            rises = tile.q_row >= last.q_row + last.q_length and tile.k_row >= last.k_row + last.k_length
            if rises and rows[id(launch)] + needed <= room:
                launch.append(tile)
                rows[id(launch)] += needed
                break
        else:
            alike.append([tile])
            rows[id(alike[-1])] = needed
    return [launch for alike in launches.values() for launch in alike]


def _of_many(tiles: Sequence[Tile], device: torch.device) -> Launch:
    queries, keys = [(t.q_row, t.q_length) for t in tiles], [(t.k_row, t.k_length) for t in tiles]
    rows, columns = _rows(queries, device), _rows(keys, device)
    square = all(tile.q_length == tile.k_length for tile in tiles)
    return Launch(tiles[0], rows, columns, square, _lengths(queries, device), _lengths(keys, device))


def _lengths(spans: Sequence[tuple[int, int]], device: torch.device) -> Lengths:
    lengths = [length for _, length in spans]
    return Lengths(on_device(np.array([0, *accumulate(lengths)], dtype=np.int32), device), max(lengths))


def _rows(spans: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    if all(row + length == following for (row, length), (following, _) in pairwise(spans)):
        return slice(spans[0][0], sum(spans[-1]))
    return on_device(np.concatenate([np.arange(row, row + length) for row, length in spans]), device)
