"""Kernel launches: a tile, or tiles of many sequences at once.

A pack has one or more tiles a sequence. On a GPU launching each may take longer than computing it, and kernels take
many sequences at once. So tiles with the same mask are launched together; an index gathers rows that are not
consecutive.
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

# Number of cached plans, for the microbatches in a pipeline: a ring has one a stop; those of gathered keys are as many
# times larger.
KEPT, KEPT_GATHERED = 512, 16

# Rows that a kernel reserves beside each sequence's own.
SPARE_ROWS = 128


@dataclass(frozen=True, eq=False)
class Lengths:
    """Consecutive spans: their ends, int32 [spans + 1], and the longest length."""

    ends: Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class Launch:
    """Rows of queries and keys, and the mask between them.

    The mask is the tile's, or with lengths each pair of spans', which is like the tile's. ``square``: the tile is, or
    all pairs are.
    """

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
        """Number of spans; None for a single tile."""
        return None if self.q_lengths is None else len(self.q_lengths.ends) - 1


def group_launches(
    plan: TilePlan, window_of: Callable[[Tile], Window], device: torch.device, room: int
) -> tuple[Launch, ...]:
    """Group the plan into launches as :func:`by_launch`; cached for all layers."""
    return (_kept_gathered if plan.gathered else _kept)(plan, window_of, device, room)


@torch.inference_mode(False)  # evaluation's tensors may be used in training later
def _group_launches(
    plan: TilePlan, window_of: Callable[[Tile], Window], device: torch.device, room: int
) -> tuple[Launch, ...]:
    each = by_launch(plan, window_of, room)
    return tuple(Launch.of(tiles[0]) if len(tiles) == 1 else _of_many(tiles, device) for tiles in each)


_kept = functools.lru_cache(maxsize=KEPT)(_group_launches)
_kept_gathered = functools.lru_cache(maxsize=KEPT_GATHERED)(_group_launches)


def by_launch(tiles: Iterable[Tile], window_of: Callable[[Tile], Window], room: int) -> list[list[Tile]]:
    """Group tiles by window (``window_of``) into launches of at most ``room`` rows.

    Rows and columns increase from tile to tile. Spare rows count; a single tile may exceed ``room``.
    """
    launches: dict[Window, list[list[Tile]]] = {}
    rows: dict[int, int] = {}  # of each launch, by id
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
