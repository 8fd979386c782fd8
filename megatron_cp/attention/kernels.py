"""A launch's attention, forward and backward, with the log-sum-exp going out and coming in.

Everything else in this package is arithmetic on rows; here the work is done, by the best kernel PyTorch ships for the
device and dtype, wrapped in the guards that kernel needs. A kernel takes [b, h, s, d] views (key and value may have
fewer heads) and must hand out, or take in, the natural-log softmax denominator [b, h, s], so that results over
different keys can be merged and gradients taken tile by tile from the final output and denominator.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.launches import Launch, Window, together
from megatron_cp.attention.merge import Gradient, OutputAccumulator, take
from megatron_cp.attention.sharding import Layout
from megatron_cp.attention.tiles import Kind, Plan, Tile, TileSize

KeyValue = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def attend(query: Tensor, key_value: KeyValue, plan: Plan, scale: float, into: OutputAccumulator) -> None:
    """Attention of [s, b, h, d] queries over [s', b, h', d] keys and values within ``plan``, merged ``into``."""
    kernel = kernel_for(query, plan.packed)
    q, k, v = (_heads_first(x) for x in (query, *key_value))
    if not any(tile.half for tile in plan):
        q, k, v = (_full_precision(x) for x in (q, k, v))
    for launch in kernel.launches(plan, q, v):
        rows, columns = launch.q_rows, launch.k_rows
        out, lse = kernel.forward(take(q, rows), take(k, columns), take(v, columns), launch, scale)
        into.add(rows, out, lse)


def attend_backward(
    dout: Tensor,
    query: Tensor,
    key_value: KeyValue,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    call: AttentionCall,
    into: tuple[Gradient, Gradient, Gradient],
) -> None:
    """Add the gradients within ``plan`` ``into`` those of query, key and value.

    ``out`` and ``lse`` are the final ones, over all keys: they make the tiles' gradients sum to the whole's.
    """
    kernel = kernel_for(query, plan.packed)
    tensors = [_heads_first(x) for x in (dout, query, *key_value, out)]
    if not any(tile.half for tile in plan):
        tensors = [_full_precision(x) for x in tensors]
    for launch in kernel.launches(plan, tensors[1], tensors[3]):
        rows, columns = launch.q_rows, launch.k_rows
        parts = [take(x, at) for x, at in zip(tensors, (rows, rows, columns, columns, rows), strict=True)]
        if not launch.tile.half:
            parts = [_full_precision(x) for x in parts]
        grads = kernel.backward(parts, take(lse, rows), launch, call)
        for total, at, grad in zip(into, (rows, columns, columns), grads, strict=True):
            total.add(at, grad)


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """FlashAttention's backward on CUDA adds in the order in which blocks finish unless PyTorch is told not to.

    Strictly: asked to warn only, PyTorch's wrapper of it warns and adds as before.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if wanted:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def forward_tiles(query: Tensor, layout: Layout) -> TileSize:
    """How the forward kernel for ``query`` wants its work cut."""
    return kernel_for(query, not layout.is_dense).forward_tiles(query.dtype)


def backward_tiles(query: Tensor, call: AttentionCall) -> TileSize:
    """How the backward kernel for ``query`` wants its work cut."""
    return kernel_for(query, not call.layout.is_dense).backward_tiles(query.dtype, call)


def by_head(x: Tensor) -> Tensor:
    """Keys or values [s, b, h, d] as [b, h, s, d], in the memory order that the kernel reads fastest."""
    x = _heads_first(x)
    return x.contiguous() if kernel_for(x).prefers_heads_apart(x.dtype) else x


def by_row(key_value: Sequence[Tensor]) -> KeyValue:
    """What :func:`by_head` gave as [s, b, h, d] again, without a copy."""
    key, value = key_value
    return key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)


class Kernel(Protocol):
    """A device's way to compute tiles. Tensors are [b, h, s, d]; ``parts`` are dout, query, key, value and out."""

    def forward_tiles(self, dtype: torch.dtype) -> TileSize: ...

    def backward_tiles(self, dtype: torch.dtype, call: AttentionCall) -> TileSize: ...

    def prefers_heads_apart(self, dtype: torch.dtype) -> bool: ...

    def launches(self, plan: Plan, q: Tensor, v: Tensor) -> Iterable[Launch]: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients: ...


def kernel_for(query: Tensor, packed: bool = False) -> Kernel:
    """PyTorch's CPU flash kernel; on CUDA in half precision cuDNN's where it is the faster one, and elsewhere PyTorch's
    flash kernel; plain matmuls otherwise."""
    if query.device.type == "cpu":
        return CpuFlash()
    if query.dtype not in (torch.bfloat16, torch.float16):
        return Matmul()
    return CudaFlash() if packed or not fast_cudnn(query.device) else Cudnn()


class CpuFlash:
    """PyTorch's CPU flash attention. It takes fewer key/value heads as they are, at full speed."""

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        """Small causal tiles, in float32.

        The kernel visits keys in blocks of 512 and computes a whole block where the diagonal crosses it, so a large
        causal tile wastes a fifth of its time; cut to 256 rows, most of that work runs as unmasked tiles. It is as
        fast in float32 as in half precision, so partial results are never rounded before they are merged. float64
        is for verification: one call for a sequence keeps it identical, bit for bit, to PyTorch's own attention.
        """
        return TileSize(causal=0 if dtype == torch.float64 else 256, band=256)

    def backward_tiles(self, dtype: torch.dtype, call: AttentionCall) -> TileSize:
        """As forward, but large bf16 tiles stay bf16 where that is faster and costs no accuracy.

        With AVX-512 the kernel is then twice as fast as in float32, and rounds what it returns: a sum of rounded parts
        is further from the truth than one rounded result. So bf16 is used where a sequence is one tile, and under a
        causal mask behind the first tokens: those see few others, and with them lies most of the gradient. The kernel
        for fp16 is of no use, being 17 times slower.
        """
        size = self.forward_tiles(dtype)
        if dtype != torch.bfloat16 or call.mask.left is not None or not fast_bf16():
            return size
        if call.mask.right == 0:
            return replace(size, half_from=512)
        return replace(size, half_from=0) if call.layout.size == 1 else size

    def prefers_heads_apart(self, dtype: torch.dtype) -> bool:
        """It is some 2 % faster where a head's keys are neighbours; float64 is left as PyTorch's attention has it."""
        return dtype != torch.float64

    def launches(self, plan: Plan, q: Tensor, v: Tensor) -> Iterable[Launch]:
        return map(Launch.of, plan)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
        tile, dim_v = launch.tile, v.shape[-1]
        q, k, v = _equal_head_dims(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.kind is Kind.CAUSAL, attn_mask=_band_mask(tile, q), scale=scale
        )
        return out[..., :dim_v], lse

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        tile, (dout, q, k, v, out) = launch.tile, parts
        dim_qk, dim_v = q.shape[-1], v.shape[-1]
        q, k, v = _equal_head_dims(q, k, v)
        dout, out = _pad_last(dout, v.shape[-1]), _pad_last(out, v.shape[-1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, tile.kind is Kind.CAUSAL, attn_mask=_band_mask(tile, q), scale=call.scale
        )
        return dq[..., :dim_qk], dk[..., :dim_qk], dv[..., :dim_v]


@functools.cache
def fast_bf16() -> bool:
    """Whether oneDNN does this CPU's bf16 matmuls; elsewhere PyTorch's own loop takes ten times as long as float32."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


FLASH_ROOM = 2**29  # numbers, two gigabytes


class CudaFlash:
    """PyTorch's FlashAttention-2: half precision, windows of any size in one call, fewer key/value heads."""

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        """As large as they come: it skips what a causal mask or a window hides."""
        return TileSize(causal=0, band=0, half_from=0)

    def backward_tiles(self, dtype: torch.dtype, call: AttentionCall) -> TileSize:
        return self.forward_tiles(dtype)

    def prefers_heads_apart(self, dtype: torch.dtype) -> bool:
        return False

    def launches(self, plan: Plan, q: Tensor, v: Tensor) -> Iterable[Launch]:
        """A pack's sequences together, as far as their queries' gradients, summed in float32, have room.

        The backward kernel computes where a sequence's sums begin in 32 bits, and would write elsewhere beyond.
        """
        if not plan.packed:
            return map(Launch.of, plan)
        a_row = q.shape[1] * -(-max(q.shape[-1], v.shape[-1]) // 64) * 64
        return together(plan, _flash_window, q.device, FLASH_ROOM // a_row)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
        dim_v = v.shape[-1]
        q, k, v = (_flash_rows(x, launch) for x in _equal_head_dims(q, k, v, multiple=8))
        left, right = _flash_window(launch.tile)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_flash_lengths(launch), 0.0, (left, right) == (-1, 0), False,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return _flash_back(out, launch)[..., :dim_v], lse if launch.q_lengths is None else lse.unsqueeze(0)

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        dout, q, k, v, out = parts
        dim_qk, dim_v = q.shape[-1], v.shape[-1]
        q, k, v = _equal_head_dims(q, k, v, multiple=8)
        dout, out = (_pad_last(x, v.shape[-1]) for x in (dout, out))
        dout, q, k, v, out = (_flash_rows(x, launch) for x in (dout, q, k, v, out))
        lse = (lse if launch.q_lengths is None else lse.squeeze(0)).contiguous()
        left, right = _flash_window(launch.tile)
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout there is not
        with _deterministic_algorithms(call.deterministic):
            grads = torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse, *_flash_lengths(launch), 0.0, (left, right) == (-1, 0), unused, unused,
                scale=call.scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip
        dq, dk, dv = (_flash_back(grad, launch) for grad in grads)
        return dq[..., :dim_qk], dk[..., :dim_qk], dv[..., :dim_v]


class Cudnn(CudaFlash):
    """cuDNN's attention, which Transformer Engine calls too, and FlashAttention for what it is not given.

    That is: windows and the corners of uneven sequences, which PyTorch's call of it does not know; backward passes that
    must be deterministic; and packs (:func:`kernel_for`), since PyTorch builds a graph for each shape, which takes tens
    of milliseconds, and keeps it for good.
    """

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        """As FlashAttention, but a causal mask begins in a tile's first corner."""
        return TileSize(causal=0, band=0, half_from=0, squares=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
        if not _cudnn_takes(q, k, v, launch.tile):
            return super().forward(q, k, v, launch, scale)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, launch.tile.kind is Kind.CAUSAL, scale=scale
        )
        return out, lse.squeeze(-1)

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        dout, q, k, v, out = parts
        if call.deterministic or not _cudnn_takes(q, k, v, launch.tile):
            return super().backward(parts, lse, launch, call)
        # PyTorch finds the graph by q's, k's and v's shapes and strides: the others' must always be the same for these.
        dout, out = (x.movedim(2, 0).contiguous().movedim(0, 2) for x in (dout, out))
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of a dropout there is not
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.contiguous().unsqueeze(-1), unused, unused, None, None, None,
            launch.tile.q_length, launch.tile.k_length, 0.0, launch.tile.kind is Kind.CAUSAL, scale=call.scale,
        )  # fmt: skip


@functools.cache
def fast_cudnn(device: torch.device) -> bool:
    """Whether PyTorch itself prefers cuDNN: on Hopper and on servers' Blackwell, newer than FlashAttention-2.

    As for PyTorch's own attention, ``TORCH_CUDNN_SDPA_DEPRIORITIZED=1`` in the environment means no. Before 9.15 cuDNN
    had faults there.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or (torch.backends.cudnn.version() or 0) < 91500:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


# cuDNN works in blocks of up to this many rows and columns. In a block that is filled up, exp(0 - lse) of a very
# negative log-sum-exp is infinite, and gradients are nan (github.com/pytorch/pytorch/issues/196678).
CUDNN_BLOCK = 128


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> bool:
    dims = q.shape[-1], v.shape[-1]
    if tile.kind is Kind.BAND or tile.q_length % CUDNN_BLOCK or tile.k_length % CUDNN_BLOCK:
        return False
    if max(dims) > 128 and dims != (192, 128):  # others have no backward pass
        return False
    return _cudnn_can(q, k, v, tile.kind is Kind.CAUSAL)


def _cudnn_can(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """PyTorch's own answer: head dims, alignment, settings such as ``torch.backends.cuda.enable_cudnn_sdp(False)``."""
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


class Matmul:
    """Attention written out in matmuls, some rows at a time: any device and dtype, to check with rather than fast."""

    ROWS = 512

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        return TileSize(causal=0, band=0)

    def backward_tiles(self, dtype: torch.dtype, call: AttentionCall) -> TileSize:
        return self.forward_tiles(dtype)

    def prefers_heads_apart(self, dtype: torch.dtype) -> bool:
        return False

    def launches(self, plan: Plan, q: Tensor, v: Tensor) -> Iterable[Launch]:
        return map(Launch.of, plan)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
        tile = launch.tile
        outs, lses = [], []
        for row in range(0, tile.q_length, self.ROWS):
            scores = self._scores(q, k, tile, row, scale)
            lse = scores.logsumexp(-1)
            outs.append((scores - lse.unsqueeze(-1)).exp() @ v.unsqueeze(2))
            lses.append(lse)
        return torch.cat(outs, dim=3).flatten(1, 2), torch.cat(lses, dim=3).flatten(1, 2)

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        tile, (dout, q, k, v, out) = launch.tile, parts
        kv_heads = k.shape[1]
        dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for row in range(0, tile.q_length, self.ROWS):
            at = slice(row, row + self.ROWS)
            do, o, queries, denominators = (x[:, :, at].unflatten(1, (kv_heads, -1)) for x in (dout, out, q, lse))
            probabilities = (self._scores(q, k, tile, row, call.scale) - denominators.unsqueeze(-1)).exp()
            delta = (do * o).sum(-1, keepdim=True)
            dscores = probabilities * (do @ v.unsqueeze(2).mT - delta) * call.scale
            dqs.append(dscores @ k.unsqueeze(2))
            dk += (dscores.mT @ queries).sum(2)
            dv += (probabilities.mT @ do).sum(2)
        return torch.cat(dqs, dim=3).flatten(1, 2), dk, dv

    def _scores(self, q: Tensor, k: Tensor, tile: Tile, row: int, scale: float) -> Tensor:
        """[b, kv_heads, heads per kv head, rows, s'], masked."""
        queries = q[:, :, row : row + self.ROWS].unflatten(1, (k.shape[1], -1))
        scores = queries @ k.unsqueeze(2).mT * scale
        if tile.kind is Kind.FULL:
            return scores
        low, high = (None, 0) if tile.kind is Kind.CAUSAL else (tile.low, tile.high)
        shifted = (None if low is None else low + row), (None if high is None else high + row)
        return scores + _additive_band(scores.shape[-2], tile.k_length, *shifted, q.dtype, q.device)


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, h, d] as [b, h, s, d]. The CPU kernel reads a strided last dim as if it were packed, so it must be."""
    return (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()).permute(1, 2, 0, 3)


def _full_precision(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _equal_head_dims(q: Tensor, k: Tensor, v: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels take one head dim: zero columns change neither scores nor the real columns of the output."""
    dim = -(-max(q.shape[-1], v.shape[-1]) // multiple) * multiple
    return _pad_last(q, dim), _pad_last(k, dim), _pad_last(v, dim)


def _pad_last(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def _flash_window(tile: Tile) -> Window:
    """FlashAttention counts a window from the diagonal that ends in the last row and column; -1 is no limit."""
    if tile.kind is Kind.CAUSAL:
        return -1, 0
    shift = tile.k_length - tile.q_length
    left = -1 if tile.low is None else shift - tile.low
    return left, -1 if tile.high is None else tile.high - shift


def _flash_lengths(launch: Launch) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Where sequences end, if there are many, and the longest.

    One row each is said to be two: with one, FlashAttention returns the denominators in another order.
    """
    q, k, tile = launch.q_lengths, launch.k_lengths, launch.tile
    if q is None or k is None:
        return None, None, tile.q_length, tile.k_length
    return q.ends, k.ends, max(q.longest, 2), k.longest


def _flash_rows(x: Tensor, launch: Launch) -> Tensor:
    """[b, h, s, d] as FlashAttention takes it: [b, s, h, d], or [s, h, d] of many sequences."""
    x = x.transpose(1, 2)
    return x if launch.q_lengths is None else x.squeeze(0)


def _flash_back(x: Tensor, launch: Launch) -> Tensor:
    return (x if launch.q_lengths is None else x.unsqueeze(0)).transpose(1, 2)


def _band_mask(tile: Tile, q: Tensor) -> Tensor | None:
    if tile.kind is not Kind.BAND:
        return None
    return _kept_band(tile.q_length, tile.k_length, tile.low, tile.high, q.dtype, q.device)


def _additive_band(
    rows: int, columns: int, low: int | None, high: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[rows, columns] with 0 where low <= column - row <= high and -inf elsewhere."""
    distance = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if low is not None:
        allowed &= distance >= low
    if high is not None:
        allowed &= distance <= high
    return torch.zeros(rows, columns, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)


_kept_band = functools.lru_cache(maxsize=64)(_additive_band)  # of the small tiles of the CPU's kernel, most are alike
