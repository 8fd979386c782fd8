"""Tiles cover exactly the allowed pairs, once, as kernels need them.

No tile is empty, and no row is without keys.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.attention.sharding import Layout, RowSpan
from megatron_cp.attention.tiles import Kind, Mask, TileSize, cover, plan, plan_gathered, ring_shifts, touches
from tests.unit_tests.attention.test_sharding import packs

masks = st.builds(Mask, st.none() | st.integers(0, 50), st.none() | st.integers(0, 50))
sizes = st.builds(
    TileSize,
    st.sampled_from([0, 1, 4, 16]),
    st.sampled_from([0, 4, 8, 32]),
    st.none() | st.integers(0, 20),
    st.booleans(),
)


def allowed_pairs(layout: Layout, q_rank: int, k_rank: int, mask: Mask) -> set[tuple[int, int]]:
    def tokens(rank):
        return [
            (span.row + i, span.sequence, span.position + i) for span in layout.spans(rank) for i in range(span.length)
        ]

    return {
        (q_row, k_row)
        for q_row, q_sequence, q in tokens(q_rank)
        for k_row, k_sequence, k in tokens(k_rank)
        if q_sequence == k_sequence
        and (mask.left is None or k >= q - mask.left)
        and (mask.right is None or k <= q + mask.right)
    }


def pairs_of(tile) -> np.ndarray:
    """List rows and columns [pairs, 2] that the tile's kernel computes."""
    rows, columns = np.mgrid[: tile.q_length, : tile.k_length]
    distance = columns - rows
    if tile.kind is Kind.CAUSAL:
        assert tile.q_length == tile.k_length
        inside = distance <= 0
    elif tile.kind is Kind.FULL:
        assert tile.low is None and tile.high is None
        inside = np.ones_like(distance, dtype=bool)
    else:
        inside = (distance >= (-(10**9) if tile.low is None else tile.low)) & (
            distance <= (10**9 if tile.high is None else tile.high)
        )
    assert tile.q_length > 0 and tile.k_length > 0
    assert inside.any(axis=1).all(), "a row without keys has no softmax denominator"
    return np.stack([rows[inside] + tile.q_row, columns[inside] + tile.k_row], axis=1)


def check_cover(plan, expected):
    tiles = list(plan)
    computed = np.concatenate([pairs_of(tile) for tile in tiles]) if tiles else np.zeros((0, 2), dtype=int)
    as_set = set(map(tuple, computed.tolist()))
    assert len(as_set) == len(computed), "a pair is computed twice"
    assert as_set == expected


@given(packs(), masks, sizes, st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_tiles_cover_the_allowed_pairs_once(pack, mask, size, data):
    cu_seqlens, padded, n = pack
    layout = Layout.packed(cu_seqlens, padded, n)
    q_rank, k_rank = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    expected = allowed_pairs(layout, q_rank, k_rank, mask)
    tiles = plan(layout, q_rank, k_rank, mask, size)
    check_cover(tiles, expected)
    assert touches(layout, q_rank, k_rank, mask) == bool(expected)
    if size.half_from is None:
        assert not any(tile.half for tile in tiles)
    if size.whole_diagonals and size.half_from == 0:
        assert all(tile.half for tile in tiles)
    if size.squares and mask == Mask(None, 0):
        assert not any(tile.kind is Kind.BAND for tile in tiles)


@given(packs(), masks, sizes, st.none() | st.integers(1, 6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_gathered_tiles_cover_the_whole_sequence(pack, mask, size, chunk):
    cu_seqlens, padded, n = pack
    layout = Layout.dense(2 * n * chunk, n) if chunk else Layout.packed(cu_seqlens, padded, n)
    place = {
        span.row + i: (span.sequence, span.position + i) for span in layout.gathered_spans() for i in range(span.length)
    }
    assert len(place) == sum(layout.lengths)
    for rank in range(n):
        mine = {
            span.row + i: (span.sequence, span.position + i) for span in layout.spans(rank) for i in range(span.length)
        }
        expected = {
            (row, column)
            for row, (sequence, q) in mine.items()
            for column, (other, k) in place.items()
            if sequence == other
            and (mask.left is None or k >= q - mask.left)
            and (mask.right is None or k <= q + mask.right)
        }
        check_cover(plan_gathered(layout, rank, mask, size), expected)


@given(packs(), masks)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_ring_skips_stops_that_no_rank_attends_to(pack, mask):
    cu_seqlens, padded, n = pack
    layout = Layout.packed(cu_seqlens, padded, n)
    needed = {
        distance
        for distance in range(n)
        for rank in range(n)
        if allowed_pairs(layout, rank, (rank - distance) % n, mask)
    }
    assert set(ring_shifts(layout, mask)) == needed | {0}


def test_causal_zigzag_needs_every_stop_and_balances_the_pairs():
    layout, causal = Layout.dense(256, 4), Mask(None, 0)
    assert ring_shifts(layout, causal) == (0, 1, 2, 3)
    work = [
        sum(len(pairs_of(t)) for k in range(4) for t in plan(layout, rank, k, causal, TileSize())) for rank in range(4)
    ]
    assert work == [sum(work) // 4] * 4


def test_a_window_of_one_chunk_needs_only_the_neighbours():
    assert ring_shifts(Layout.dense(16 * 8, 8), Mask(8, 0)) == (0, 1, 7)


def test_an_unmasked_stop_is_one_tile():
    layout, causal = Layout.dense(64, 4), Mask(None, 0)
    for source, rows in ((0, (16, 8)), (3, (8, 16))):
        (tile,) = plan(layout, 1, source, causal, TileSize())
        assert tile.kind is Kind.FULL and (tile.q_length, tile.k_length) == rows


def test_a_kernel_that_skips_masked_pairs_gets_whole_diagonals():
    layout, causal = Layout.packed([0, 24, 60], [0, 32, 72], 2), Mask(None, 0)

    def tiles(found):
        return [(t.kind, t.q_row, t.q_length, t.k_row, t.k_length) for t in found]

    own = [
        [(Kind.CAUSAL, row, rows, row, rows) for row, rows in part]
        for part in ([(0, 8), (16, 16)], [(0, 16), (16, 20)])
    ]
    assert [tiles(plan(layout, rank, rank, causal, TileSize())) for rank in range(2)] == own
    # With other rows between them, its chunks do not make one square.
    apart = (RowSpan(0, 4, 0, 0), RowSpan(6, 4, 12, 0))
    rows = [row for span in apart for row in range(span.row, span.row + span.length)]
    check_cover(cover(apart, apart, causal, TileSize()), {(q, k) for q in rows for k in rows if k <= q})
    # Of all keys up to the queries' last, the diagonal ends in the last corner.
    gathered = tiles(plan_gathered(layout, 1, causal, TileSize()))
    assert gathered == [(Kind.BAND, 0, 16, 0, 24), (Kind.BAND, 16, 20, 32, 30)]
    # A kernel for squares only gets the part before the diagonal separately.
    own, before = tiles(plan_gathered(Layout.dense(32, 2), 0, causal, TileSize(squares=True))), (Kind.FULL, 8, 8, 0, 16)
    assert before in own and {kind for kind, *_ in own} == {Kind.FULL, Kind.CAUSAL}


def test_float32_work_is_kept_apart_from_half_precision():
    tiles = plan(Layout.dense(64, 1), 0, 0, Mask(None, 0), TileSize(causal=8, half_from=16))
    assert all((max(t.q_row, t.k_row) >= 16) == t.half for t in tiles)
    assert max(t.q_length for t in tiles if t.kind is Kind.CAUSAL and not t.half) == 8
    assert max(t.q_length for t in tiles if t.kind is Kind.CAUSAL and t.half) == 48


@pytest.mark.parametrize("window", [(-2, 0), (0, -5)])
def test_window_sizes_below_minus_one_are_refused(window):
    with pytest.raises(ValueError, match="window_size must hold numbers >= 0, or -1"):
        Mask.build(True, window)
