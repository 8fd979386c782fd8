"""Attention of a plan, forward and backward.

Selects the best kernel for the device and dtype (:mod:`.cpu`, :mod:`.cuda`, :mod:`.te`). A kernel takes [b, h, s, d]
views (key and value may have fewer heads). The forward returns the natural-log softmax denominator [b, h, s], by which
results over different keys are merged. The backward computes gradients tile by tile from the final output and
denominator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.base import Kernel
from megatron_cp.attention.kernels.cpu import CpuFlash, Matmul
from megatron_cp.attention.kernels.cuda import CudaFlash, Cudnn, fast_cudnn
from megatron_cp.attention.kernels.te import TeFused
from megatron_cp.attention.merge import Gradient, OutputAccumulator, take
from megatron_cp.attention.tiles import TilePlan, TileSize

KeyValue = tuple[Tensor, Tensor]


def attend(query: Tensor, key_value: KeyValue, plan: TilePlan, call: AttentionCall, into: OutputAccumulator) -> None:
    """Attend within ``plan``, and merge the result ``into``."""
    kernel = kernel_for(query, call)
    q, k, v = (_heads_first(x) for x in (query, *key_value))
    if not any(tile.half for tile in plan):
        q, k, v = (_full_precision(x) for x in (q, k, v))
    if call.max_logits is not None:
        _measure(call.max_logits, q, k, plan, call.scale)
    for launch in kernel.launches(plan, q, v):
        rows, columns = launch.q_rows, launch.k_rows
        out, lse = kernel.forward(take(q, rows), take(k, columns), take(v, columns), launch, call)
        into.add(rows, out, lse)


def _measure(max_logits: Tensor, q: Tensor, k: Tensor, plan: TilePlan, scale: float) -> None:
    """Raise ``max_logits`` [heads], in place, to the largest scores within ``plan``.

    Computes one more matrix product per tile.
    """
    for tile in plan:
        queries, keys = (_full_precision(x) for x in (take(q, tile.q_rows), take(k, tile.k_rows)))
        max_logits.copy_(torch.maximum(max_logits, Matmul().max_logits(queries, keys, tile, scale)))


def attend_backward(
    dout: Tensor,
    query: Tensor,
    key_value: KeyValue,
    out: Tensor,
    lse: Tensor,
    plan: TilePlan,
    call: AttentionCall,
    into: tuple[Gradient, Gradient, Gradient],
) -> None:
    """Add the gradients within ``plan`` ``into`` those of query, key and value.

    ``out`` and ``lse`` are final, over all keys, so that gradients of tiles sum to the total gradient.
    """
    kernel = kernel_for(query, call)
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


def forward_tiles(query: Tensor, call: AttentionCall) -> TileSize:
    """Return the tile limits of the forward kernel for ``query``."""
    return kernel_for(query, call).forward_tiles(query.dtype)


def backward_tiles(query: Tensor, call: AttentionCall) -> TileSize:
    """Return the tile limits of the backward kernel for ``query``."""
    return kernel_for(query, call).backward_tiles(query.dtype, call)


def as_read(x: Tensor) -> Tensor:
    """Return keys or values in the memory order that the kernel reads fastest.

    On CPUs about 2 % faster if a head's keys are neighbours, [b, h, s, d]; float64 keeps the order of PyTorch's
    attention. GPUs read rows.
    """
    return _heads_first(x).contiguous() if _reads_by_head(x) else x


def by_row(key_value: Sequence[Tensor]) -> KeyValue:
    """Return :func:`as_read`'s result as [s, b, h, d], without a copy."""
    key, value = key_value
    return (key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)) if _reads_by_head(key) else (key, value)


def _reads_by_head(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype != torch.float64


def kernel_for(query: Tensor, call: AttentionCall) -> Kernel:
    """Choose the kernel for the device and dtype.

    CPU: PyTorch's flash kernel. CUDA in half precision: Transformer Engine's if the call allows it, else cuDNN's if it
    is faster, else PyTorch's flash kernel. Otherwise plain matmuls.
    """
    if query.device.type == "cpu":
        return CpuFlash()
    if query.dtype not in (torch.bfloat16, torch.float16):
        return Matmul()
    if call.transformer_engine:
        return TeFused()
    return Cudnn() if call.layout.is_dense and fast_cudnn(query.device) else CudaFlash()


def _heads_first(x: Tensor) -> Tensor:
    """Permute [s, b, h, d] to [b, h, s, d], with a contiguous last dim."""
    return (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()).permute(1, 2, 0, 3)


def _full_precision(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
