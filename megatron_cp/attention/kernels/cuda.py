"""PyTorch's attention kernels on CUDA, in half precision: FlashAttention-2 and cuDNN's."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.base import Gradients, Kernel, Result, equal_head_dims, pad_last
from megatron_cp.attention.kernels.launches import Launch, Window, group_launches
from megatron_cp.attention.tiles import Kind, Tile, TilePlan, TileSize

FLASH_ROOM = 2**29  # numbers, two gigabytes


class CudaFlash(Kernel):
    """PyTorch's FlashAttention-2: half precision, windows of any size in one call, fewer key/value heads."""

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        """As large as they come: it skips what a causal mask or a window hides."""
        return TileSize(causal=0, band=0, half_from=0)

    def launches(self, plan: TilePlan, q: Tensor, v: Tensor) -> Iterable[Launch]:
        """A pack's sequences together, as far as their queries' gradients, summed in float32, have room.

        The backward kernel computes where a sequence's sums begin in 32 bits, and would write elsewhere beyond.
        """
        if not plan.packed:
            return super().launches(plan, q, v)
        a_row = q.shape[1] * -(-max(q.shape[-1], v.shape[-1]) // 64) * 64
        return group_launches(plan, flash_window, q.device, FLASH_ROOM // a_row)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttentionCall) -> Result:
        dim_v = v.shape[-1]
        q, k, v = (_flash_rows(x, launch) for x in equal_head_dims(q, k, v, multiple=8))
        left, right = flash_window(launch.tile)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_flash_lengths(launch), 0.0, (left, right) == (-1, 0), False,
            scale=call.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return _flash_back(out, launch)[..., :dim_v], lse if launch.q_lengths is None else lse.unsqueeze(0)

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        dout, q, k, v, out = parts
        dim_qk, dim_v = q.shape[-1], v.shape[-1]
        q, k, v = equal_head_dims(q, k, v, multiple=8)
        dout, out = (pad_last(x, v.shape[-1]) for x in (dout, out))
        dout, q, k, v, out = (_flash_rows(x, launch) for x in (dout, q, k, v, out))
        lse = (lse if launch.q_lengths is None else lse.squeeze(0)).contiguous()
        left, right = flash_window(launch.tile)
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttentionCall) -> Result:
        if not _cudnn_takes(q, k, v, launch.tile):
            return super().forward(q, k, v, launch, call)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, launch.tile.kind is Kind.CAUSAL, scale=call.scale
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


def flash_window(tile: Tile) -> Window:
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
