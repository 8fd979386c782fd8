"""Tiles: query-key pairs of a rank as rectangles. Pure arithmetic.

A mask is a band: query i may see key j when i - left <= j <= i + right, by positions in their common sequence. Causal
attention is ``right = 0``. Between a span of queries and a span of keys (consecutive tokens each) the band leaves a
region, which :func:`plan` covers with disjoint tiles:

    FULL     every pair of the rectangle is allowed
    CAUSAL   a square on the diagonal: row x sees columns 0..x
    BAND     row x sees columns x+low .. x+high; every row has at least one

Rectangles without allowed pairs never become tiles, so no kernel gets an empty block or a row without keys.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple

from megatron_cp.attention.placement.layout import AnyLayout
from megatron_cp.attention.sharding import Layout, RowSpan


class Kind(enum.Enum):
    """Mask within a tile."""

    FULL = enum.auto()
    CAUSAL = enum.auto()
    BAND = enum.auto()


@dataclass(frozen=True)
class Mask:
    """Allowed distances: ``left`` tokens back, ``right`` tokens ahead; None: no limit."""

    left: int | None = None
    right: int | None = None

    @classmethod
    def build(cls, causal: bool, window_size: tuple[int, int] | None) -> Mask:
        """Build from arguments; -1 in ``window_size`` is no limit."""
        window = (-1, -1) if window_size is None else window_size
        if not (isinstance(window, Sequence) and len(window) == 2 and all(isinstance(x, Integral) for x in window)):
            raise ValueError(f"window_size must be two integers (left, right), got {window_size!r}")
        left, right = window
        if left < -1 or right < -1:
            raise ValueError(f"window_size must hold numbers >= 0, or -1 for no limit, got {window_size}")
        return cls(None if left == -1 else left, 0 if causal else None if right == -1 else right)


class Tile(NamedTuple):
    """Rectangle of the score matrix; ``low`` and ``high`` (column - row) bound a BAND.

    None is no limit. ``half``: compute in the tensors' half precision; otherwise in float32.
    """

    q_row: int
    q_length: int
    k_row: int
    k_length: int
    kind: Kind
    low: int | None = None
    high: int | None = None
    half: bool = False

    @property
    def q_rows(self) -> slice:
        return slice(self.q_row, self.q_row + self.q_length)

    @property
    def k_rows(self) -> slice:
        return slice(self.k_row, self.k_row + self.k_length)


@dataclass(frozen=True)
class TileSize:
    """Limits of a kernel on its tiles.

    ``causal``: CAUSAL tiles longer than this are split into halves and a FULL square between them (0: never; ``half``
    tiles never are). ``band``: largest number of rows of a BAND tile (0: no limit, for kernels that support windows).
    ``half_from``: tiles beyond this position in their sequence are ``half`` (None: none). ``squares``: the kernel
    supports causal masks of squares only, not a diagonal that ends in the last corner of a tile wider than high.
    """

    causal: int = 0
    band: int = 0
    half_from: int | None = None
    squares: bool = False

    @property
    def whole_diagonals(self) -> bool:
        """Whether the kernel skips masked parts itself."""
        return not self.causal and not self.band


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Disjoint tiles, made once for all layers; compared by identity.

    ``packed``: several sequences with separate queries and keys; ``gathered``: keys of all ranks.
    """

    tiles: tuple[Tile, ...]
    packed: bool
    gathered: bool = False

    def __iter__(self) -> Iterator[Tile]:
        return iter(self.tiles)


@functools.lru_cache(maxsize=4096)
def plan(layout: AnyLayout, q_rank: int, k_rank: int, mask: Mask, size: TileSize) -> TilePlan:
    """Plan tiles of ``q_rank``'s queries and ``k_rank``'s keys."""
    return TilePlan(tuple(cover(layout.spans(q_rank), layout.spans(k_rank), mask, size)), not layout.is_dense)


@functools.lru_cache(maxsize=1024)
def plan_gathered(layout: Layout, q_rank: int, mask: Mask, size: TileSize) -> TilePlan:
    """Plan tiles of ``q_rank``'s queries and all keys, ordered by ``gathered_spans``."""
    tiles = tuple(cover(layout.spans(q_rank), layout.gathered_spans(), mask, size))
    return TilePlan(tiles, not layout.is_dense, gathered=True)


def cover(q_spans: tuple[RowSpan, ...], k_spans: tuple[RowSpan, ...], mask: Mask, size: TileSize) -> list[Tile]:
    """Cover the allowed pairs of two lists of spans by disjoint tiles."""
    border = size.half_from or 0
    keys_of = _by_sequence(_divide(k_spans, border))
    tiles: list[Tile] = []
    for sequence, queries in _by_sequence(_divide(q_spans, border)).items():
        keys = keys_of.get(sequence, [])
        if not border and size.whole_diagonals and mask == Mask(None, 0) and _are_the_same(queries, keys):
            # Rows are in the order of positions, so a causal mask of positions is one of rows.
            length = sum(span.length for span in queries)
            tiles.append(Tile(queries[0].row, length, keys[0].row, length, Kind.CAUSAL, half=size.half_from == 0))
            continue
        for q_span in queries:
            for k_span in keys:
                half = size.half_from is not None and max(q_span.position, k_span.position) >= border
                tiles.extend(_cut(_region(q_span, k_span, mask, half), size))
    full = [tile for tile in tiles if tile.kind is Kind.FULL]
    return [*_join(full), *(tile for tile in tiles if tile.kind is not Kind.FULL)]


def _are_the_same(queries: list[RowSpan], keys: list[RowSpan]) -> bool:
    """Return whether both are the same tokens, in rows ordered by position."""
    return [(span.position, span.length) for span in queries] == [
        (span.position, span.length) for span in keys
    ] and all(
        one.row + one.length == other.row and one.position < other.position
        for spans in (queries, keys)
        for one, other in pairwise(spans)
    )


def touches(layout: AnyLayout, q_rank: int, k_rank: int, mask: Mask) -> bool:
    """Return whether any query of ``q_rank`` sees any key of ``k_rank``."""
    k_spans = _by_sequence(layout.spans(k_rank))
    return any(
        _trim(_region(q_span, k_span, mask)) is not None
        for q_span in layout.spans(q_rank)
        for k_span in k_spans.get(q_span.sequence, ())
    )


@functools.lru_cache(maxsize=4096)
def seen(layout: AnyLayout, q_rank: int, k_rank: int, mask: Mask) -> tuple[RowSpan, ...]:
    """Return the rows of ``k_rank`` that queries of ``q_rank`` see.

    In row order; consecutive tokens join.
    """
    queries = _by_sequence(layout.spans(q_rank))
    found: list[RowSpan] = []
    for k_span in layout.spans(k_rank):
        tiles = (_trim(_region(q_span, k_span, mask)) for q_span in queries.get(k_span.sequence, ()))
        for row, end in sorted((tile.k_row, tile.k_row + tile.k_length) for tile in tiles if tile is not None):
            rows = RowSpan(row, end - row, k_span.position + row - k_span.row, k_span.sequence)
            last = found[-1] if found else None
            if last and row <= last.row + last.length and _diagonal(last) == _diagonal(rows):
                found[-1] = last._replace(length=max(end, last.row + last.length) - last.row)
            else:
                found.append(rows)
    return tuple(found)


def _diagonal(span: RowSpan) -> tuple[int, int]:
    return span.sequence, span.position - span.row


@functools.lru_cache(maxsize=4096)
def plan_seen(layout: AnyLayout, q_rank: int, k_ranks: tuple[int, ...], mask: Mask, size: TileSize) -> TilePlan:
    """Plan tiles of ``q_rank``'s queries and the rows it sees of ``k_ranks``, joined."""
    spans: list[RowSpan] = []
    for span in (span for k_rank in k_ranks for span in seen(layout, q_rank, k_rank, mask)):
        spans.append(span._replace(row=spans[-1].row + spans[-1].length if spans else 0))
    return TilePlan(tuple(cover(layout.spans(q_rank), tuple(spans), mask, size)), packed=True)


@functools.lru_cache(maxsize=256)
def ring_shifts(layout: AnyLayout, mask: Mask) -> tuple[int, ...]:
    """Return the distances at which some rank sees a key; 0 is first.

    A ring needs to stop only at these: keys and values may skip the others.
    """
    n = layout.size
    return tuple(d for d in range(n) if d == 0 or any(touches(layout, r, (r - d) % n, mask) for r in range(n)))


def _by_sequence(spans: Iterable[RowSpan]) -> dict[int, list[RowSpan]]:
    grouped: dict[int, list[RowSpan]] = {}
    for span in spans:
        grouped.setdefault(span.sequence, []).append(span)
    return grouped


def _divide(spans: Iterable[RowSpan], border: int) -> Iterator[RowSpan]:
    """Split spans at the position ``border``."""
    for span in spans:
        before = border - span.position
        if 0 < before < span.length:
            yield span._replace(length=before)
            yield span._replace(row=span.row + before, length=span.length - before, position=border)
        else:
            yield span


def _region(q_span: RowSpan, k_span: RowSpan, mask: Mask, half: bool = False) -> Tile:
    offset = q_span.position - k_span.position
    low = None if mask.left is None else offset - mask.left
    high = None if mask.right is None else offset + mask.right
    return Tile(q_span.row, q_span.length, k_span.row, k_span.length, Kind.BAND, low, high, half)


def _trim(tile: Tile) -> Tile | None:
    """Drop outer rows and columns without allowed pairs, and limits that do not bind."""
    low, high = tile.low, tile.high
    if low is not None and high is not None and low > high:
        return None
    first_row = max(0, -high) if high is not None else 0
    last_row = min(tile.q_length, tile.k_length - low) if low is not None else tile.q_length
    if first_row >= last_row:
        return None
    first_column = max(0, first_row + low) if low is not None else 0
    last_column = min(tile.k_length, last_row + high) if high is not None else tile.k_length
    if first_column >= last_column:
        return None
    return _part(tile, first_row, last_row, first_column, last_column)


def _part(tile: Tile, row: int, row_end: int, column: int, column_end: int) -> Tile:
    """Return a sub-rectangle of a BAND tile, with limits that bind."""
    rows, columns = row_end - row, column_end - column
    low = None if tile.low is None else tile.low + row - column
    high = None if tile.high is None else tile.high + row - column
    low = None if low is not None and low <= 1 - rows else low
    high = None if high is not None and high >= columns - 1 else high
    return Tile(tile.q_row + row, rows, tile.k_row + column, columns, Kind.BAND, low, high, tile.half)


def _split(tile: Tile, rows: Sequence[int], columns: Sequence[int], size: TileSize) -> Iterator[Tile]:
    """Yield parts of a BAND tile, each cut for the kernel."""
    for row, row_end in pairwise(rows):
        for column, column_end in pairwise(columns):
            yield from _cut(_part(tile, row, row_end, column, column_end), size)


def _cut(region: Tile, size: TileSize) -> Iterator[Tile]:
    tile = _trim(region)
    if tile is None:
        return
    rows, columns, low, high = tile.q_length, tile.k_length, tile.low, tile.high
    if low is None and high is None:
        yield tile._replace(kind=Kind.FULL)
    elif low is None and high == 0 and rows == columns:
        if tile.half or not size.causal or rows <= size.causal:
            yield tile._replace(kind=Kind.CAUSAL, high=None)
        else:
            yield from _split(tile, (0, rows // 2, rows), (0, rows // 2, rows), size)
    elif low is None and high is not None and high > 0:
        if size.whole_diagonals and not size.squares and rows + high == columns:
            yield tile
        else:  # all rows see the first columns; the diagonal starts after them
            yield from _split(tile, (0, rows), (0, high, columns), size)
    elif low is None:  # a diagonal that ends above the last row: rows below see everything
        yield from _split(tile, (0, columns, rows), (0, columns), size)
    else:
        yield from _cut_band(tile, low, size)


def _cut_band(tile: Tile, low: int, size: TileSize) -> Iterator[Tile]:
    """Cut a band with a binding left limit into row blocks."""
    rows, columns = tile.q_length, tile.k_length
    high = tile.high if tile.high is not None else columns - 1
    if not size.band:
        # FlashAttention counts the right limit from the last row's last column, and ignores a limit as long as the tile
        # is wide: rows that the limit does not bind become a tile of their own. Beside a left limit, no right limit is
        # as long as that: it binds the first rows of a tile higher than wide, which the left limit does not bind.
        if tile.high is not None and high + rows >= 2 * columns:
            yield from _split(tile, (0, columns - high, rows), (0, columns), size)
        elif tile.high is None and rows > columns + 1:
            yield from _split(tile, (0, 1 - low, rows), (0, columns), size)
        else:
            yield tile
        return
    block = max(size.band // 4, min(size.band, high - low + 1))
    middle, middle_end = max(0, low + rows - 1), min(columns, high + 1)
    if rows > block:
        yield from _split(tile, (0, rows // 2, rows), (0, columns), size)
    elif middle_end - middle >= 2 * rows and (middle > 0 or middle_end < columns):
        yield from _split(tile, (0, rows), (0, middle, middle_end, columns), size)
    else:
        yield tile


def _join(tiles: list[Tile]) -> list[Tile]:
    """Join touching full tiles: along the keys, then along the queries."""
    joined: dict[tuple[int, int, int, bool], Tile] = {}
    for tile in sorted(tiles, key=lambda t: t.k_row):
        left = joined.pop((tile.q_row, tile.q_length, tile.k_row, tile.half), None)
        if left is not None:
            tile = left._replace(k_length=left.k_length + tile.k_length)
        joined[tile.q_row, tile.q_length, tile.k_row + tile.k_length, tile.half] = tile
    result: dict[tuple[int, int, int, bool], Tile] = {}
    for tile in sorted(joined.values(), key=lambda t: t.q_row):
        above = result.pop((tile.k_row, tile.k_length, tile.q_row, tile.half), None)
        if above is not None:
            tile = above._replace(q_length=above.q_length + tile.q_length)
        result[tile.k_row, tile.k_length, tile.q_row + tile.q_length, tile.half] = tile
    return list(result.values())
