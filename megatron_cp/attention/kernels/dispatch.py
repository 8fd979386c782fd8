"""A launch's attention, forward and backward, with the log-sum-exp going out and coming in.

Everything else in this package is arithmetic on rows; here the work is done, by the best kernel there is for the device
and dtype, wrapped in the guards that kernel needs (``cpu_kernels``, ``cuda_kernels``, ``te_kernels``). A kernel takes
[b, h, s, d] views (key and value may have fewer heads) and must hand out, or take in, the natural-log softmax
denominator [b, h, s], so that results over different keys can be merged and gradients taken tile by tile from the final
output and denominator.
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
from megatron_cp.attention.tiles import Plan, TileSize

KeyValue = tuple[Tensor, Tensor]


def attend(query: Tensor, key_value: KeyValue, plan: Plan, call: AttentionCall, into: OutputAccumulator) -> None:
    """Attention of [s, b, h, d] queries over [s', b, h', d] keys and values within ``plan``, merged ``into``."""
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


def _measure(max_logits: Tensor, q: Tensor, k: Tensor, plan: Plan, scale: float) -> None:
    """Raise ``max_logits`` [heads], in place, to the largest scores within ``plan``: one more product of matrices."""
    for tile in plan:
        queries, keys = (_full_precision(x) for x in (take(q, tile.q_rows), take(k, tile.k_rows)))
        max_logits.copy_(torch.maximum(max_logits, Matmul().max_logits(queries, keys, tile, scale)))


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
    """How the forward kernel for ``query`` wants its work cut."""
    return kernel_for(query, call).forward_tiles(query.dtype)


def backward_tiles(query: Tensor, call: AttentionCall) -> TileSize:
    """How the backward kernel for ``query`` wants its work cut."""
    return kernel_for(query, call).backward_tiles(query.dtype, call)


def as_read(x: Tensor) -> Tensor:
    """Keys or values [s, b, h, d] with their dimensions in the memory order that the kernel reads fastest.

    The CPU's is some 2 % faster where a head's keys are neighbours, [b, h, s, d]; float64 is left as PyTorch's
    attention has it. On a GPU all read rows.
    """
    return _heads_first(x).contiguous() if _reads_by_head(x) else x


def by_row(key_value: Sequence[Tensor]) -> KeyValue:
    """What :func:`as_read` gave as [s, b, h, d] again, without a copy."""
    key, value = key_value
    return (key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)) if _reads_by_head(key) else (key, value)


def _reads_by_head(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype != torch.float64


def kernel_for(query: Tensor, call: AttentionCall) -> Kernel:
    """PyTorch's CPU flash kernel; on CUDA in half precision Transformer Engine's if the call allows it, else cuDNN's
    where it is the faster one, and PyTorch's flash kernel elsewhere; plain matmuls otherwise."""
    if query.device.type == "cpu":
        return CpuFlash()
    if query.dtype not in (torch.bfloat16, torch.float16):
        return Matmul()
    if call.transformer_engine:
        return TeFused()
    return Cudnn() if call.layout.is_dense and fast_cudnn(query.device) else CudaFlash()


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, h, d] as [b, h, s, d]. The CPU kernel reads a strided last dim as if it were packed, so it must be."""
    return (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()).permute(1, 2, 0, 3)


def _full_precision(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
