"""Forward and backward of one tile against naive attention.

The checks around PyTorch's kernels are tested too.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels import cpu as cpu_kernels
from megatron_cp.attention.kernels import cuda as cuda_kernels
from megatron_cp.attention.kernels import dispatch as kernels
from megatron_cp.attention.kernels.cpu import CpuFlash, Matmul
from megatron_cp.attention.kernels.cuda import CudaFlash, Cudnn, fast_cudnn, flash_window
from megatron_cp.attention.kernels.dispatch import attend, attend_backward
from megatron_cp.attention.kernels.launches import Launch, by_launch
from megatron_cp.attention.kernels.te import TeFused
from megatron_cp.attention.merge import Gradient, OutputAccumulator
from megatron_cp.attention.reference import reference_attention
from megatron_cp.attention.sharding import Layout, partition_indices
from megatron_cp.attention.tiles import Kind, Mask, Tile, TileSize, plan, plan_gathered
from tests.ranks import run_ranks

KERNELS = {"cpu": CpuFlash(), "matmul": Matmul()}


def run(kernel_name, monkeypatch, inputs, dout, mask, size, scale=0.3):
    monkeypatch.setattr(kernels, "kernel_for", lambda query, call: KERNELS[kernel_name])
    query, key, value = inputs
    layout = Layout.dense(len(query), 1)
    tiles = plan(layout, 0, 0, mask, size)
    call = AttentionCall(layout, mask, scale)
    result = OutputAccumulator(query, value.shape[-1])
    attend(query, (key, value), tiles, call, into=result)
    out, lse = result.finish(None)
    grads = Gradient(query), Gradient(key), Gradient(value)
    attend_backward(dout, query, (key, value), out, lse, tiles, call, into=grads)
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


def test_long_rows_of_matmuls_are_split(monkeypatch):
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
    monkeypatch.setattr(cpu_kernels, "fast_bf16", lambda: fast_bf16)
    call = AttentionCall(Layout.dense(4096, 1), mask, 1.0)
    assert CpuFlash().backward_tiles(dtype, call).half_from == half_from
    assert CpuFlash().forward_tiles(dtype).half_from is None


def test_one_tile_in_half_precision_keeps_the_kernels_output():
    """No copy in float32 may be made of a single tile.

    It would take five more passes over memory, a seventh of the time that a GPU needs for 4K tokens.
    """
    query = torch.randn(8, 1, 2, 4).bfloat16()
    out, lse = torch.randn(1, 8, 2, 4).bfloat16().transpose(1, 2), torch.randn(1, 2, 8)
    result, gradient = OutputAccumulator(query, 4), Gradient(query)
    result.add(slice(0, 8), out, lse)
    gradient.add(slice(0, 8), out)
    assert result.finish(None)[0].data_ptr() == gradient.finish().data_ptr() == out.data_ptr()
    part = Gradient(query)
    part.add(slice(2, 6), out[:, :, 2:6])
    assert part._sum.dtype == torch.bfloat16 and torch.equal(part.finish()[2:6], out[:, :, 2:6].permute(2, 0, 1, 3))
    # Sums are in float32, and the kernel's own output does not change.
    before = out.clone()
    result.add(slice(4, 8), out[:, :, 4:], lse[:, :, 4:])
    gradient.add(slice(4, 8), out[:, :, 4:])
    assert gradient.total().dtype == torch.float32 and torch.equal(out, before)
    assert torch.equal(gradient.total()[4:], 2 * out.float().permute(2, 0, 1, 3)[4:])


def flash_sees(tile: Tile, longest: int) -> np.ndarray:
    """Return what FlashAttention's kernels let a tile see, [rows, columns].

    The limits are clamped and placed as in FlashAttention's sources. ``longest``: the most keys of a tile of the same
    launch, by which the limits are clamped.
    """
    left, right = flash_window(tile)
    left, right = (-1 if limit >= longest else limit for limit in (left, right))
    if left >= 0 and right < 0:
        right = longest
    rows, columns = np.mgrid[: tile.q_length, : tile.k_length]
    diagonal = rows + tile.k_length - tile.q_length
    sees = np.ones(rows.shape, dtype=bool)
    if left >= 0:
        sees &= columns >= diagonal - left
    if right >= 0:
        sees &= columns <= diagonal + right
    return sees


def wanted(tile: Tile) -> np.ndarray:
    rows, columns = np.mgrid[: tile.q_length, : tile.k_length]
    low, high = (None, 0) if tile.kind is Kind.CAUSAL else (tile.low, tile.high)
    sees = np.ones(rows.shape, dtype=bool)
    if low is not None:
        sees &= columns - rows >= low
    if high is not None:
        sees &= columns - rows <= high
    return sees


PACK = Layout.packed([0, 7, 36, 44, 45, 60], [0, 8, 40, 48, 52, 68], 2)
LAYOUTS = [*(Layout.dense(48, n) for n in (1, 2, 3, 4)), Layout.packed([0, 8, 40, 48], None, 2), PACK]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_attention_masks_what_a_tile_masks(layout):
    size = CudaFlash().forward_tiles(torch.bfloat16)
    for left in (None, 0, 1, 5, 7, 11, 16, 22, 23, 40):
        for right in (None, 0, 1, 4, 9, 17):
            mask = Mask(left, right)
            for rank in range(layout.size):
                plans = [plan(layout, rank, k, mask, size) for k in range(layout.size)]
                for tiles in (*plans, plan_gathered(layout, rank, mask, size)):
                    for launch in by_launch(tiles, flash_window, 10**9) if tiles.packed else ([t] for t in tiles):
                        longest = max(tile.k_length for tile in launch)
                        for tile in launch:
                            assert (flash_sees(tile, longest) == wanted(tile)).all(), (mask, tile, longest)


def on_cuda(
    mask: Mask,
    dtype: torch.dtype,
    s: int = 72,
    ranks: int = 1,
    deterministic: bool = False,
    ends: tuple[int, ...] = (),
    te: bool = False,
    **dims: int,
) -> list[torch.Tensor]:
    """Return output and gradients of ``ranks`` ranks over gathered keys.

    The ranks compute one after the other. One rank also takes a pack of sequences with these ``ends``.
    """
    inputs, dout = draw(s, dtype=dtype, **dims)
    query, key, value, dout = (x.cuda() for x in (*inputs, dout))
    layout = Layout.packed([0, *ends], None, ranks) if ends else Layout.dense(len(query), ranks)
    call = AttentionCall(layout, mask, 0.3, deterministic, transformer_engine=te)
    output, dquery = torch.zeros_like(dout), torch.zeros_like(query)
    rows_of = [partition_indices(torch.tensor([0, s]), rank, ranks).cuda() for rank in range(ranks)]
    order = torch.cat([rows.chunk(2)[half] for half in range(2) for rows in rows_of])  # as they are gathered
    key, value = key[order], value[order]
    dkey, dvalue = Gradient(key), Gradient(value)
    for rank, rows in enumerate(rows_of):
        tiles = plan_gathered(layout, rank, mask, kernels.forward_tiles(query, call))
        result = OutputAccumulator(query[rows], value.shape[-1])
        attend(query[rows], (key, value), tiles, call, into=result)
        output[rows], lse = result.finish(None)
        mine = Gradient(query[rows])
        attend_backward(
            dout[rows], query[rows], (key, value), output[rows], lse, tiles, call, into=(mine, dkey, dvalue)
        )
        dquery[rows] = mine.finish()
    back = order.argsort()
    return [x.cpu() for x in (output, dquery, dkey.finish()[back], dvalue.finish()[back])]


def compare_on_cuda(mask: Mask, dtype: torch.dtype, tolerance: float, ranks: int) -> None:
    inputs, dout = draw(72, dtype=dtype)
    check(on_cuda(mask, dtype, 72, ranks), expected(inputs, dout, mask), tolerance)


def twice_on_cuda(mask: Mask, ends: tuple[int, ...], te: bool) -> bool:
    """Return whether two backward passes give the same bits.

    PyTorch's setting must be as before, too.
    """
    passes = [on_cuda(mask, torch.bfloat16, 1024, deterministic=True, ends=ends, te=te, b=1) for _ in range(2)]
    assert not torch.are_deterministic_algorithms_enabled()
    return all(torch.equal(a, b) for a, b in zip(*passes, strict=True))


# All in a rank of its own, what it is compared with too: where there is a GPU, a process's first backward pass starts
# autograd's threads and CUDA, also on the CPU, and none that it forks afterwards could take one.
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("mask", [Mask(), Mask(None, 0), Mask(9, 0), Mask(5, 7), Mask(20, 0), Mask(20, None)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_cuda_kernels(mask, dtype, tolerance, ranks):
    run_ranks(compare_on_cuda, 1, mask, dtype, tolerance, ranks)


def by_cudnn_on_cuda(
    mask: Mask, ranks: int, deterministic: bool, dims: dict[str, int], below_zero: bool = False
) -> tuple[float, int, int, bool]:
    """Return worst difference, counts of launches, and whether cuDNN is faster.

    The difference is relative to the largest value. The counts are of tiles that cuDNN and FlashAttention computed,
    forward and backward. With ``below_zero`` the scores of the first rows are far below zero: rows that fill up a block
    would change results.
    """
    drawn = inputs, dout = draw(768, dtype=torch.bfloat16, **{"b": 1, **dims})
    if below_zero:
        inputs[1][:100, ..., 0], inputs[0][..., 0] = -60.0, 8.0
    with counted(CudaFlash) as flash, counted(Cudnn) as every, mock.patch(f"{__name__}.draw", lambda *_, **__: drawn):
        got = on_cuda(mask, torch.bfloat16, 768, ranks, deterministic)
    want = expected(inputs, dout, mask)
    worst = max(float((g.double() - w).abs().max() / w.abs().max()) for g, w in zip(got, want, strict=True))
    return worst, every.total() - flash.total(), flash.total(), fast_cudnn(torch.device("cuda", 0))


@contextlib.contextmanager
def counted(kernel: type) -> Iterator[Counter[str]]:
    """Count a kernel's launches by direction, including kernels built on it."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def launch(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return launch

    with contextlib.ExitStack() as stack:
        for name in ("forward", "backward"):
            stack.enter_context(mock.patch.object(kernel, name, counting(name, getattr(kernel, name))))
        yield calls


LATENT = {"qk_dim": 192, "v_dim": 128, "heads": 2, "kv_heads": 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("mask", "ranks", "tiles", "dims", "deterministic"),
    [
        (Mask(None, 0), 1, (2, 0), {"qk_dim": 64, "v_dim": 64}, False),
        # One square per chunk, and the part before it, if any.
        (Mask(None, 0), 3, (26, 0), {"qk_dim": 64, "v_dim": 64}, False),
        (Mask(None, 0), 3, (13, 13), {"qk_dim": 64, "v_dim": 64}, True),
        (Mask(), 3, (6, 0), {"qk_dim": 128, "v_dim": 128, "b": 2}, False),
        (Mask(300, 0), 1, (0, 2), {"qk_dim": 64, "v_dim": 64}, False),
        (Mask(None, 0), 1, (2, 0), LATENT, False),
        (Mask(None, 0), 1, (1, 1), LATENT, True),
        (Mask(None, 0), 1, (0, 2), {"qk_dim": 160, "v_dim": 160}, False),
    ],
    ids=[
        "one rank",
        "three ranks",
        "three ranks, deterministic",
        "all see all",
        "window",
        "latent attention",
        "latent attention, deterministic",
        "head dims of others",
    ],
)
def test_cudnn(mask, ranks, tiles, dims, deterministic):
    """cuDNN must compute where it is faster, but for deterministic backward passes.

    FlashAttention computes those.
    """
    ((worst, by_cudnn, by_flash, fast),) = run_ranks(by_cudnn_on_cuda, 1, mask, ranks, deterministic, dims)
    assert worst <= 2e-2
    assert (by_cudnn, by_flash) == (tiles if fast else (0, sum(tiles)))
    if not deterministic:
        # There dq is the small difference of large numbers, of which the output, rounded to bf16, leaves hundredths.
        ((worst, *_),) = run_ranks(by_cudnn_on_cuda, 1, mask, ranks, deterministic, dims, True)
        assert worst <= 1e-1


@pytest.mark.parametrize(("capability", "fast"), [((9, 0), True), ((10, 3), True), ((8, 0), False), ((12, 0), False)])
def test_cudnn_is_preferred_where_pytorch_prefers_it(capability, fast, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    ask = fast_cudnn.__wrapped__
    assert ask(device) == fast
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91400)
    assert not ask(device)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not ask(device)


def packs_on_cuda(
    mask: Mask,
    sequences: int,
    gathered: bool,
    dims: tuple[int, int] = (16, 16),
    room: int | None = None,
    te: bool = False,
) -> tuple[float, int]:
    """Return the worst difference and the most launches of a stop or a gather.

    Two ranks compute one after the other, with the keys of both. The difference is from float64, over the largest
    value.
    """
    cuda_kernels.FLASH_ROOM = room or cuda_kernels.FLASH_ROOM
    rng = np.random.default_rng(7)
    padded = 4 * rng.integers(1, 12, sequences)
    layout = Layout(tuple(int(x) for x in padded - rng.integers(0, 4, sequences)), tuple(padded.tolist()), 2)
    offsets = np.cumsum([0, *padded])
    inputs, dout = draw(int(offsets[-1]), b=1, qk_dim=dims[0], v_dim=dims[1], dtype=torch.bfloat16)
    real = np.concatenate([np.arange(at, at + n) for at, n in zip(offsets, layout.lengths, strict=False)])
    window = (-1 if mask.left is None else mask.left, -1 if mask.right is None else mask.right)
    want = [torch.zeros_like(x, dtype=torch.float64) for x in (dout, *inputs)]
    for at, n in zip(offsets, layout.lengths, strict=False):
        exact = [x[at : at + n].double().requires_grad_() for x in inputs]
        out = reference_attention(*exact, causal=mask.right == 0, window_size=window, softmax_scale=0.3)
        grads = torch.autograd.grad(out, exact, dout[at : at + n].double())
        for whole, part in zip(want, (out.detach(), *grads), strict=True):
            whole[at : at + n] = part
    rubbish = [x.clone() for x in (*inputs, dout)]
    for x in rubbish:  # padding does not count
        x[np.setdiff1d(np.arange(len(x)), real)] = torch.nan
    query, key, value, dout = (x.cuda() for x in rubbish)
    call = AttentionCall(layout, mask, 0.3, transformer_engine=te)
    rows_of = [torch.from_numpy(partition_indices(offsets, rank, 2)).cuda() for rank in range(2)]
    got = [torch.zeros_like(x) for x in (dout, query, key, value)]
    launches = []
    for rank, rows in enumerate(rows_of):
        size = kernels.forward_tiles(query, call)
        visits = [(rows_of[k], plan(layout, rank, k, mask, size)) for k in range(2)]
        if gathered:
            visits = [(torch.arange(len(key)).cuda(), plan_gathered(layout, rank, mask, size))]
        result, mine = OutputAccumulator(query[rows], value.shape[-1]), Gradient(query[rows])
        for columns, tiles in visits:
            attend(query[rows], (key[columns], value[columns]), tiles, call, into=result)
        out, lse = result.finish(None)
        for columns, tiles in visits:
            dkey, dvalue = Gradient(key[columns]), Gradient(value[columns])
            with counted(TeFused if te else CudaFlash) as calls:
                attend_backward(
                    dout[rows], query[rows], (key[columns], value[columns]), out, lse, tiles, call, (mine, dkey, dvalue)
                )
            launches.append(calls["backward"])
            got[2][columns] += dkey.finish()
            got[3][columns] += dvalue.finish()
        got[0][rows], got[1][rows] = out, mine.finish()
    return max(float((g.cpu().double() - w).abs().max() / w.abs().max()) for g, w in zip(got, want, strict=True)), max(
        launches
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("mask", [Mask(), Mask(None, 0), Mask(9, 0), Mask(5, 7), Mask(20, None)])
def test_cuda_packs(mask, gathered):
    """All of a pack's sequences must need one launch, up to four with gathered keys.

    Windows need more: sequences' corners cut them into pieces of many shapes.
    """
    differences, launches = zip(*(run_ranks(packs_on_cuda, 1, mask, n, gathered)[0] for n in (5, 40)), strict=True)
    assert max(differences) <= 2e-2
    if mask.left is None:
        assert max(launches) <= (4 if gathered else 1)


NEEDS_TE = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")
MASKS = (Mask(), Mask(None, 0), Mask(20, 0), Mask(9, 5))


def by_te_on_cuda(mask: Mask, gathered: bool, packed: bool, deterministic: bool) -> tuple[float, int, int, int]:
    """Return the worst difference, the counts of launches, and the GPU's generation.

    The launches are those of Transformer Engine's kernels and of FlashAttention.
    """
    with counted(CudaFlash) as flash, counted(TeFused) as every:
        if packed:
            worst, _ = packs_on_cuda(mask, 5, gathered, (32, 32), te=True)
        else:
            got = on_cuda(mask, torch.bfloat16, 384, 3 if gathered else 1, deterministic, te=True, qk_dim=32, v_dim=32)
            want = expected(*draw(384, dtype=torch.bfloat16, qk_dim=32, v_dim=32), mask)
            worst = max(float((g.double() - w).abs().max() / w.abs().max()) for g, w in zip(got, want, strict=True))
    return worst, every.total() - flash.total(), flash.total(), torch.cuda.get_device_capability()[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@NEEDS_TE
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(
    ("mask", "packed", "deterministic"),
    [
        *((mask, True, False) for mask in MASKS),
        *((mask, False, False) for mask in MASKS),
        (Mask(None, 0), False, True),
    ],
)
def test_te_kernels(mask, packed, gathered, deterministic):
    """The kernels must compute whole and packed sequences, and causal windows.

    FlashAttention computes other shapes.
    """
    ((worst, by_te, by_flash, generation),) = run_ranks(by_te_on_cuda, 1, mask, gathered, packed, deterministic)
    assert worst <= 2e-2
    if generation in (9, 10):
        if mask.left is None or (mask.right == 0 and not packed and not gathered):
            assert by_te and not by_flash
        elif not packed and not gathered:
            assert by_flash and not by_te


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_packs_of_other_shapes():
    """Head dims may differ and be no multiples of eight.

    There is room for the gradients of some sequences at a time.
    """
    ((difference, at_once),) = run_ranks(packs_on_cuda, 1, Mask(None, 0), 40, False, (20, 12))
    assert difference <= 2e-2 and at_once == 1
    ((difference, launches),) = run_ranks(packs_on_cuda, 1, Mask(None, 0), 40, False, (20, 12), 1000 * 6 * 64)
    assert difference <= 2e-2 and 5 <= launches <= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("ends", [(), (700, 710, 1024)])
@pytest.mark.parametrize("te", [False, pytest.param(True, marks=NEEDS_TE)], ids=["PyTorch's", "te_kernels"])
def test_cuda_determinism(te, ends):
    assert run_ranks(twice_on_cuda, 1, Mask(None, 0), ends, te) == [True]


def test_determinism_is_requested_strictly(monkeypatch):
    """PyTorch's wrapper of FlashAttention's backward only warns in warn-only mode."""
    asked = []

    def backward(dout, q, k, v, *_, **__):
        asked.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
        return q, k, v

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    layout, (tile,) = Layout.dense(8, 1), plan(Layout.dense(8, 1), 0, 0, Mask(), TileSize())
    parts = [torch.zeros(1, 2, 8, 8) for _ in range(5)]
    for deterministic in (False, True):
        call = AttentionCall(layout, Mask(), 1.0, deterministic=deterministic)
        CudaFlash().backward(parts, torch.zeros(1, 2, 8), Launch.of(tile), call)
    assert asked == [(False, False), (True, False)]
    assert not torch.are_deterministic_algorithms_enabled()
