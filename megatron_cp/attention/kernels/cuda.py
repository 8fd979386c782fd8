"""PyTorch's half-precision kernels on CUDA: FlashAttention-2 and cuDNN's."""

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
    """PyTorch's FlashAttention-2: half precision, any window, fewer k/v heads."""

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        """Return tiles as large as possible: the kernel skips masked parts.

        A causal mask or a window masks them.
        """
        return TileSize(causal=0, band=0, half_from=0)

    def launches(self, plan: TilePlan, q: Tensor, v: Tensor) -> Iterable[Launch]:
        """Group a pack's sequences, within the room for query gradients summed in float32.

        The backward kernel computes the start of a sequence's sums in 32 bits, and would write elsewhere beyond.
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
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is 0
        with _deterministic_algorithms(call.deterministic):
            grads = torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse, *_flash_lengths(launch), 0.0, (left, right) == (-1, 0), unused, unused,
                scale=call.scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip
        dq, dk, dv = (_flash_back(grad, launch) for grad in grads)
        return dq[..., :dim_qk], dk[..., :dim_qk], dv[..., :dim_v]


class Cudnn(CudaFlash):
    """cuDNN's attention, with FlashAttention as the fallback.

    The fallback computes windows and corners of uneven sequences, which PyTorch's call does not support; deterministic
    backward passes; and packs (:func:`kernel_for`), because PyTorch builds a graph for each shape, which takes tens of
    milliseconds, and keeps it forever.
    """

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        """Return FlashAttention's sizes, but start a causal mask in a tile's first corner."""
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
        # PyTorch looks up the graph by shapes and strides of q, k and v: the others' must be a function of these.
        dout, out = (x.movedim(2, 0).contiguous().movedim(0, 2) for x in (dout, out))
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # random state of dropout, which is 0
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.contiguous().unsqueeze(-1), unused, unused, None, None, None,
            launch.tile.q_length, launch.tile.k_length, 0.0, launch.tile.kind is Kind.CAUSAL, scale=call.scale,
        )  # fmt: skip


@functools.cache
def fast_cudnn(device: torch.device) -> bool:
    """Return whether PyTorch prefers cuDNN: on Hopper and server Blackwell.

    As in PyTorch, ``TORCH_CUDNN_SDPA_DEPRIORITIZED=1`` in the environment means no. cuDNN before 9.15 had faults there.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or (torch.backends.cudnn.version() or 0) < 91500:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


# cuDNN uses blocks of up to this many rows and columns. In a partial block exp(0 - lse) of a very negative log-sum-exp
# is infinite, and gradients are nan (github.com/pytorch/pytorch/issues/196678).
CUDNN_BLOCK = 128


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> bool:
    dims = q.shape[-1], v.shape[-1]
    if tile.kind is Kind.BAND or tile.q_length % CUDNN_BLOCK or tile.k_length % CUDNN_BLOCK:
        return False
    if max(dims) > 128 and dims != (192, 128):  # others have no backward pass
        return False
    return _cudnn_can(q, k, v, tile.kind is Kind.CAUSAL)


def _cudnn_can(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Return PyTorch's check of head dims, alignment and settings."""
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Make FlashAttention's CUDA backward add blocks in a fixed order in the body.

    Strict mode: with warn_only, PyTorch's wrapper warns and adds in the order in which blocks finish.
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
    """Return FlashAttention's window, relative to the last corner's diagonal.

    -1 is no limit.
    """
    if tile.kind is Kind.CAUSAL:
        return -1, 0
    shift = tile.k_length - tile.q_length
    left = -1 if tile.low is None else shift - tile.low
    return left, -1 if tile.high is None else tile.high - shift


def _flash_lengths(launch: Launch) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the ends of sequences, if there are several, and the longest lengths.

    A longest length of 1 is given as 2: with 1, FlashAttention returns the denominators in another order.
    """
    q, k, tile = launch.q_lengths, launch.k_lengths, launch.tile
    if q is None or k is None:
        return None, None, tile.q_length, tile.k_length
    return q.ends, k.ends, max(q.longest, 2), k.longest


def _flash_rows(x: Tensor, launch: Launch) -> Tensor:
    """Convert [b, h, s, d] to FlashAttention's [b, s, h, d], or [s, h, d] of a pack."""
    x = x.transpose(1, 2)
    return x if launch.q_lengths is None else x.squeeze(0)


def _flash_back(x: Tensor, launch: Launch) -> Tensor:
    return (x if launch.q_lengths is None else x.unsqueeze(0)).transpose(1, 2)
