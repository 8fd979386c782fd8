"""Grouped launches of many sequences' tiles compute each tile once.

The numbers are the same as tile by tile.
"""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels import dispatch as kernels
from megatron_cp.attention.kernels import launches
from megatron_cp.attention.kernels.cpu import Matmul
from megatron_cp.attention.kernels.cuda import CudaFlash, flash_window
from megatron_cp.attention.kernels.dispatch import attend, attend_backward
from megatron_cp.attention.kernels.launches import SPARE_ROWS, Launch, by_launch, group_launches
from megatron_cp.attention.merge import Gradient, OutputAccumulator
from megatron_cp.attention.sharding import Layout
from megatron_cp.attention.tiles import Kind, Mask, Tile, TileSize, plan, plan_gathered
from tests.unit_tests.attention.test_sharding import packs
from tests.unit_tests.attention.test_tiles import masks

CPU = torch.device("cpu")
ROOM = 10**9
CAUSAL = Mask(None, 0)
window_of = flash_window


@given(packs(), masks, st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_each_tile_is_in_one_launch_whose_rows_rise(pack, mask, data):
    cu_seqlens, padded, n = pack
    layout = Layout.packed(cu_seqlens, padded, n)
    q_rank, k_rank = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    room = data.draw(st.sampled_from([1, 300, 700, 10**9]))
    for tiles in (plan(layout, q_rank, k_rank, mask, TileSize()), plan_gathered(layout, q_rank, mask, TileSize())):
        grouped = by_launch(tiles, window_of, room)
        assert sorted(map(repr, (tile for launch in grouped for tile in launch))) == sorted(map(repr, tiles))
        for launch in grouped:
            assert len({window_of(tile) for tile in launch}) == 1
            assert len(launch) == 1 or sum(tile.q_length + SPARE_ROWS for tile in launch) <= room
            for one, other in pairwise(launch):
                assert one.q_rows.stop <= other.q_row and one.k_rows.stop <= other.k_row


class OneByOne(Matmul):
    """Many sequences in a launch, as a kernel that takes them would compute them."""

    def launches(self, plan, q, v):
        return group_launches(plan, window_of, q.device, ROOM)

    def _each(self, launch):
        left, right = window_of(launch.tile)
        ends = (pairwise(x.ends.tolist()) for x in (launch.q_lengths, launch.k_lengths))
        for (q, q_end), (k, k_end) in zip(*ends, strict=True):
            rows, columns = q_end - q, k_end - k
            low = None if left < 0 else columns - rows - left
            high = None if right < 0 else columns - rows + right
            yield slice(q, q_end), slice(k, k_end), Launch.of(Tile(0, rows, 0, columns, Kind.BAND, low, high))

    def forward(self, q, k, v, launch, call):
        if launch.q_lengths is None:
            return super().forward(q, k, v, launch, call)
        parts = [
            super(OneByOne, self).forward(q[:, :, at], k[:, :, of], v[:, :, of], one, call)
            for at, of, one in self._each(launch)
        ]
        return tuple(torch.cat(each, dim=2) for each in zip(*parts, strict=True))

    def backward(self, parts, lse, launch, call):
        if launch.q_lengths is None:
            return super().backward(parts, lse, launch, call)
        dout, q, k, v, out = parts
        grads = []
        for at, of, one in self._each(launch):
            pieces = [dout[:, :, at], q[:, :, at], k[:, :, of], v[:, :, of], out[:, :, at]]
            grads.append(super().backward(pieces, lse[:, :, at], one, call))
        return tuple(torch.cat(each, dim=2) for each in zip(*grads, strict=True))


def attention(kernel, layout, mask, visits, tensors):
    """Compute output and gradients of a rank.

    Its queries attend to the keys of ``visits``, pairs of rows and tiles.
    """
    query, key, value, dout = tensors
    call = AttentionCall(layout, mask, 0.3)
    with mock.patch.object(kernels, "kernel_for", lambda query, call: kernel):
        result = OutputAccumulator(query, value.shape[-1])
        for rows, tiles in visits:
            attend(query, (key[rows], value[rows]), tiles, call, into=result)
        out, lse = result.finish(None)
        dquery, dkey, dvalue = Gradient(query), torch.zeros_like(key), torch.zeros_like(value)
        for rows, tiles in visits:
            grads = dquery, Gradient(key[rows]), Gradient(value[rows])
            attend_backward(dout, query, (key[rows], value[rows]), out, lse, tiles, call, into=grads)
            dkey[rows] += grads[1].finish()
            dvalue[rows] += grads[2].finish()
    return out, dquery.finish(), dkey, dvalue


@pytest.mark.parametrize("mask", [CAUSAL, Mask(), Mask(6, 0), Mask(5, 7), Mask(4, None)])
@pytest.mark.parametrize("rank", [0, 1])
def test_grouped_launches_equal_single_launches(mask, rank):
    """Grouping must not change results.

    Padding makes rows be collected; the few rows of a stop are merged into those of the previous stop.
    """
    layout = Layout((7, 29, 8, 1, 15, 0, 3), (8, 32, 8, 4, 16, 4, 4), 2)
    generator = torch.Generator().manual_seed(5)
    rows = layout.rows
    shapes = [(rows, 1, 4, 8), (2 * rows, 1, 2, 8), (2 * rows, 1, 2, 8), (rows, 1, 4, 8)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    size = TileSize()
    ring = [(slice(k * rows, k * rows + rows), plan(layout, rank, k, mask, size)) for k in (rank, 1 - rank)]
    for visits in (ring, [(slice(None), plan_gathered(layout, rank, mask, size))]):
        one_by_one = attention(Matmul(), layout, mask, visits, tensors)
        for got, want in zip(attention(OneByOne(), layout, mask, visits, tensors), one_by_one, strict=True):
            assert (got - want).abs().max() < 1e-13 * want.abs().max()


def test_a_ring_stop_is_one_launch_for_any_number_of_sequences():
    rng = np.random.default_rng(1)
    for count in (3, 50):
        padded = tuple((8 * rng.integers(1, 9, count)).tolist())
        layout = Layout(tuple(int(n - rng.integers(0, 3)) for n in padded), padded, 4)
        for rank in range(4):
            for source in range(4):
                assert len(group_launches(plan(layout, rank, source, CAUSAL, TileSize()), window_of, CPU, ROOM)) == 1
            # With gathered keys a rank's second chunk attends to its first; a single row attends to all given keys.
            assert len(group_launches(plan_gathered(layout, rank, CAUSAL, TileSize()), window_of, CPU, ROOM)) <= 4


def test_a_launch_has_room_for_its_gradients():
    """The kernel computes row times heads times size in 32 bits.

    FlashAttention's backward kernel finds a sequence's first row this way.
    """
    layout, heads, dim = Layout((131072,) * 8, (131072,) * 8, 8), 128, 192
    work = plan(layout, 0, 0, CAUSAL, TileSize(half_from=0))
    q, v = (torch.empty(1).expand(1, heads, layout.rows, size) for size in (dim, 128))
    assert layout.rows * heads * dim > 2**31
    for share, launches_needed in ((1, 8), (4, 2), (16, 1)):  # of the heads, as with tensor parallelism
        found = list(CudaFlash().launches(work, q[:, : heads // share], v[:, : heads // share]))
        assert len(found) == launches_needed and sum(len(rows_of(launch)) for launch in found) == layout.rows
        assert all(len(rows_of(launch)) * heads // share * dim <= 2**29 for launch in found)


def rows_of(launch):
    return range(10**9)[launch.q_rows]


def test_rows_that_follow_each_other_are_not_collected():
    tiles = plan(Layout((8, 24, 16), (8, 24, 16), 1), 0, 0, CAUSAL, TileSize())
    (launch,) = group_launches(tiles, window_of, CPU, ROOM)
    assert launch.q_rows == launch.k_rows == slice(0, 48)
    assert launch.q_lengths.ends.tolist() == [0, 8, 32, 48] and launch.q_lengths.longest == 24


def test_layers_share_copied_tables(monkeypatch):
    sent = []
    monkeypatch.setattr(launches, "on_device", lambda table, device: sent.append(table) or torch.from_numpy(table))
    layout = Layout((7, 5), (8, 8), 1)
    for _layer in range(3):
        tiles = plan(layout, 0, 0, CAUSAL, TileSize(half_from=0))
        with torch.inference_mode():
            (launch,) = group_launches(tiles, window_of, CPU, ROOM)
    assert len(sent) == 4, "the rows and the ends, of queries and of keys"
    assert not launch.q_rows.is_inference()


@pytest.mark.parametrize("first", [slice(0, 3), slice(4, 6), torch.tensor([5, 1])])
def test_new_rows_are_written_and_others_merged(first):
    """Each row must attend to the keys of all its blocks.

    Blocks come in any order and overlap.
    """
    rows = [first, slice(2, 5), torch.tensor([0, 4, 6]), slice(6, 8), slice(7, 9), slice(9, 10), slice(0, 10)]
    scores = torch.randn(len(rows), 1, 2, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = torch.randn(len(rows), 10, 1, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for count in range(1, len(rows) + 1):
        result = OutputAccumulator(torch.zeros(10, 1, 2, 3, dtype=torch.float64), 3)
        seen = torch.full((len(rows), 1, 2, 10), -torch.inf, dtype=torch.float64)
        for block in range(count):
            at = rows[block]
            result.add(at, values[block].permute(1, 2, 0, 3)[:, :, at].clone(), scores[block][:, :, at].clone())
            seen[block][:, :, at] = scores[block][:, :, at]
        out, lse = result.finish(None)
        assert torch.allclose(lse, seen.logsumexp(0), rtol=1e-14, atol=0)
        want = torch.einsum("kbhs,ksbhd->sbhd", seen.softmax(0).nan_to_num(0.0), values)
        assert torch.allclose(out, want, rtol=1e-13, atol=1e-14)
