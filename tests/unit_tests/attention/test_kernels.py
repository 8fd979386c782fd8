"""One tile's forward and backward against the written-out attention, and the guards around PyTorch's kernels."""

import pytest
import torch

from megatron_cp.attention import kernels
from megatron_cp.attention.context import Problem
from megatron_cp.attention.kernels import CpuFlash, Matmul, attend, attend_backward
from megatron_cp.attention.merge import Gradient, OutputAccumulator
from megatron_cp.attention.reference import reference_attention
from megatron_cp.attention.sharding import Layout
from megatron_cp.attention.tiles import Mask, TileSize, plan

KERNELS = {"cpu": CpuFlash(), "matmul": Matmul()}


def run(kernel_name, monkeypatch, inputs, dout, mask, size, scale=0.3):
    monkeypatch.setattr(kernels, "kernel_for", lambda query: KERNELS[kernel_name])
    query, key, value = inputs
    layout = Layout.dense(len(query), 1)
    tiles = plan(layout, 0, 0, mask, size)
    result = OutputAccumulator(query, value.shape[-1])
    attend(query, (key, value), tiles, scale, into=result)
    out, lse = result.finish(None)
    grads = Gradient(query), Gradient(key), Gradient(value)
    attend_backward(dout, query, (key, value), out, lse, tiles, Problem(layout, mask, scale), into=grads)
    return [out, *(grad.finish() for grad in grads)]


def expected(inputs, dout, mask, scale=0.3):
    exact = [x.double().requires_grad_() for x in inputs]
    window = (-1 if mask.left is None else mask.left, -1 if mask.right is None else mask.right)
    out = reference_attention(*exact, causal=mask.right == 0, window_size=window, softmax_scale=scale)
    return [out.detach(), *torch.autograd.grad(out, exact, dout.double())]


def draw(s=70, b=2, heads=6, kv_heads=3, qk_dim=16, v_dim=16, dtype=torch.float64):
    shapes = [(s, b, heads, qk_dim), (s, b, kv_heads, qk_dim), (s, b, kv_heads, v_dim), (s, b, heads, v_dim)]
    generator = torch.Generator().manual_seed(3)
    *inputs, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return inputs, dout


def check(got, want, tolerance):
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).abs().max() <= tolerance * w.abs().max()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", [Mask(), Mask(None, 0), Mask(9, 0), Mask(5, 7), Mask(None, 4), Mask(3, None)])
@pytest.mark.parametrize("size", [TileSize(), TileSize(causal=16, band=8)])
def test_every_kind_of_tile(kernel, mask, size, monkeypatch):
    inputs, dout = draw()
    check(run(kernel, monkeypatch, inputs, dout, mask, size), expected(inputs, dout, mask), 1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(24, 16), (16, 24)])
def test_head_dims_that_differ(kernel, qk_dim, v_dim, monkeypatch):
    inputs, dout = draw(qk_dim=qk_dim, v_dim=v_dim)
    check(
        run(kernel, monkeypatch, inputs, dout, Mask(None, 0), TileSize()), expected(inputs, dout, Mask(None, 0)), 1e-13
    )


def test_a_strided_head_dim_is_made_contiguous_before_the_kernel_misreads_it(monkeypatch):
    inputs, dout = draw()
    strided = [x.mT.contiguous().mT for x in inputs]
    assert strided[0].stride(-1) != 1
    check(run("cpu", monkeypatch, strided, dout, Mask(), TileSize()), expected(inputs, dout, Mask()), 1e-13)


def test_long_rows_of_matmuls_are_taken_in_pieces(monkeypatch):
    monkeypatch.setattr(Matmul, "ROWS", 16)
    inputs, dout = draw()
    for mask in (Mask(), Mask(None, 0), Mask(20, 3)):
        check(run("matmul", monkeypatch, inputs, dout, mask, TileSize()), expected(inputs, dout, mask), 1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)])
def test_precisions(dtype, tolerance, monkeypatch):
    inputs, dout = draw(dtype=dtype)
    size = TileSize(causal=16, band=8)
    check(run("cpu", monkeypatch, inputs, dout, Mask(None, 0), size), expected(inputs, dout, Mask(None, 0)), tolerance)


@pytest.mark.parametrize(
    ("fast_bf16", "dtype", "mask", "half_from"),
    [
        (True, torch.bfloat16, Mask(None, 0), 512),
        (True, torch.bfloat16, Mask(), 0),
        (True, torch.bfloat16, Mask(7, 0), None),
        (True, torch.float16, Mask(), None),
        (False, torch.bfloat16, Mask(None, 0), None),
        (False, torch.bfloat16, Mask(), None),
    ],
)
def test_the_backward_pass_uses_bf16_where_it_is_fast_and_exact(fast_bf16, dtype, mask, half_from, monkeypatch):
    monkeypatch.setattr(kernels, "fast_bf16", lambda: fast_bf16)
    problem = Problem(Layout.dense(4096, 1), mask, 1.0)
    assert CpuFlash().backward_tiles(dtype, problem).half_from == half_from
    assert CpuFlash().forward_tiles(dtype).half_from is None


def test_flash_attention_windows_count_from_the_bottom_right_corner():
    """FlashAttention's window (left, right) lets row i see columns i + shift - left .. i + shift + right."""
    for n, mask in ((3, Mask(7, 2)), (4, Mask(11, 0)), (2, Mask(0, 5))):
        layout = Layout.dense(48, n)
        for q_rank in range(n):
            for k_rank in range(n):
                for tile in plan(layout, q_rank, k_rank, mask, TileSize()):
                    left, right = kernels._flash_window(tile)
                    shift = tile.k_length - tile.q_length
                    assert left >= 0 or tile.low is None
                    assert right >= 0 or tile.high is None
                    for row in range(tile.q_length):
                        for column in range(tile.k_length):
                            seen = (tile.low is None or column - row >= tile.low) and (
                                tile.high is None or column - row <= tile.high
                            )
                            flash = (left < 0 or column >= row + shift - left) and (
                                right < 0 or column <= row + shift + right
                            )
                            assert seen == flash or tile.kind.name == "CAUSAL"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("mask", [Mask(), Mask(None, 0), Mask(9, 0), Mask(5, 7)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_cuda_kernels(mask, dtype, tolerance):
    inputs, dout = draw(dtype=dtype)
    query, key, value = (x.cuda() for x in inputs)
    layout = Layout.dense(len(query), 1)
    tiles = plan(layout, 0, 0, mask, kernels.forward_tiles(query))
    result = OutputAccumulator(query, value.shape[-1])
    attend(query, (key, value), tiles, 0.3, into=result)
    out, lse = result.finish(None)
    grads = Gradient(query), Gradient(key), Gradient(value)
    attend_backward(dout.cuda(), query, (key, value), out, lse, tiles, Problem(layout, mask, 0.3), into=grads)
    got = [out.cpu(), *(grad.finish().cpu() for grad in grads)]
    check(got, expected(inputs, dout, mask), tolerance)
