"""Compute PyTorch's CUDA-only kernels that our attention calls.

The signatures are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _scores(
    q: Tensor, k: Tensor, scale: float | None, causal: bool, left: int | None, right: int | None, longest: int
) -> Tensor:
    """Return scores [b, h, s, s'] in float32 of [b, s, h, d].

    The window counts from the bottom-right diagonal. ``longest``: the most keys of a sequence of the launch, which
    FlashAttention uses to judge the limits.
    """
    heads = q.shape[2] // k.shape[2]
    q, k = (x.float().transpose(1, 2) for x in (q, k))
    scores = q @ k.repeat_interleave(heads, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    rows, columns = scores.shape[-2:]
    distance = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    right = 0 if causal else right
    left, right = (None if limit is None or not 0 <= limit < longest else limit for limit in (left, right))
    if left is not None and right is None:
        right = longest  # as FlashAttention sets it, which binds where a tile is higher than wide
    if right is not None:
        scores = scores.masked_fill(distance > right, -torch.inf)
    if left is not None:
        scores = scores.masked_fill(distance < -left, -torch.inf)
    return scores


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(f"FlashAttention only supports fp16 and bf16 data type, not {x.dtype}")
        if x.shape[-1] % 8 or x.shape[-1] > 256 or x.stride(-1) != 1:
            raise RuntimeError(f"FlashAttention was given a head of {x.shape[-1]} elements, stride {x.stride(-1)}")


def _check_lengths(
    q: Tensor, k: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int
) -> list[tuple[slice, slice]]:
    """Check the rows of each sequence's queries and keys."""
    ends = []
    for x, cumulative, longest in ((q, cum_q, max_q), (k, cum_k, max_k)):
        if x.ndim != 3 or cumulative.dtype != torch.int32 or not cumulative.is_contiguous():
            raise RuntimeError("FlashAttention takes [rows, heads, dim] and int32 offsets of many sequences")
        offsets = _numbers(cumulative)
        if offsets[0] != 0 or offsets[-1] != len(x) or max(b - a for a, b in pairwise(offsets)) > longest:
            raise RuntimeError(f"{len(x)} rows, the longest sequence of {longest}, do not fit {offsets}")
        ends.append(offsets)
    if len(ends[0]) != len(ends[1]):
        raise RuntimeError("FlashAttention takes as many sequences of keys as of queries")
    if max_q == 1:
        raise RuntimeError("with one row each FlashAttention gives denominators by groups of heads")
    return [(slice(*of_q), slice(*of_k)) for of_q, of_k in zip(*map(pairwise, ends), strict=True)]


def _numbers(x: Tensor) -> list[int]:
    """Read arguments as the kernel does, without making the host wait."""
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.tolist(x)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **unused: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(q, k, v)
    state = torch.zeros(2, dtype=torch.uint64)
    limits = (scale, causal, window_size_left, window_size_right, max_k)
    if cum_q is None:
        out, lse = _forward(q, k, v, *limits)
    else:
        sequences = _check_lengths(q, k, cum_q, cum_k, max_q, max_k)
        each = [_forward(q[None, rows], k[None, columns], v[None, columns], *limits) for rows, columns in sequences]
        out, lse = torch.cat([o[0] for o, _ in each]), torch.cat([x[0] for _, x in each], dim=1)
    return out, lse, state, state.clone(), torch.empty(0, dtype=q.dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, *limits: Any) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, *limits)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    values = v.float().transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1)
    return (probabilities @ values).transpose(1, 2).to(q.dtype).contiguous(), lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(dout, q, k, v, out)
    if lse.dtype != torch.float32 or not lse.is_contiguous():
        raise RuntimeError("FlashAttention takes contiguous float32 denominators")
    limits = (scale, causal, window_size_left, window_size_right, max_k)
    if cum_q is None:
        return _backward(dout, q, k, v, out, lse, *limits)
    sums = q.shape[1] * -(-q.shape[-1] // 32) * 32  # of a row's gradients
    if _numbers(cum_q)[-2] * sums >= 2**31:
        raise RuntimeError("FlashAttention counts to where a sequence's sums begin in 32 bits")
    if lse.shape != (q.shape[1], len(q)):
        raise RuntimeError("FlashAttention takes denominators [heads, rows] of many sequences")
    each = []
    for rows, columns in _check_lengths(q, k, cum_q, cum_k, max_q, max_k):
        of_q, of_k = [x[None, rows] for x in (dout, q, out)], [x[None, columns] for x in (k, v)]
        each.append(_backward(*of_q[:2], *of_k, of_q[2], lse[None, :, rows], *limits))
    return tuple(torch.cat([grad[0] for grad in grads]) for grads in zip(*each, strict=True))


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *limits: Any
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, heads = k.shape[2], q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if limits[0] is None else limits[0]
    scores = _scores(q, k, scale, *limits[1:])
    probabilities = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    do, o, queries, keys, values = (x.float().transpose(1, 2) for x in (dout, out, q, k, v))
    keys, values = (x.repeat_interleave(heads, 1) for x in (keys, values))
    dscores = probabilities * (do @ values.mT - (do * o).sum(-1, keepdim=True)) * scale
    dq, dk, dv = dscores @ keys, dscores.mT @ queries, probabilities.mT @ do
    dk, dv = (x.unflatten(1, (kv_heads, heads)).sum(2) for x in (dk, dv))
    return tuple(x.transpose(1, 2).to(q.dtype).contiguous() for x in (dq, dk, dv))  # type: ignore[return-value]


def cudnn_can(parameters: Any, debug: bool = False) -> bool:
    """Replace ``torch.backends.cuda.can_use_cudnn_attention``.

    Covers the features that our attention uses.
    """
    q, v = parameters.query, parameters.value
    return not (q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8 or v.shape[-1] % 8)


_graphs: dict[Any, Any] = {}  # shapes of the graph that PyTorch cached for a backward pass


def _check_cudnn(*tensors: Tensor) -> None:
    for x in tensors:
        if x.stride(-1) != 1 or x.shape[-1] % 8 or any(stride % 8 for stride in x.stride()[:-1]):
            raise RuntimeError(f"cuDNN was given a tensor {tuple(x.shape)} with strides {x.stride()}")
        if x.shape[2] % 128:
            raise RuntimeError(f"cuDNN's attention may fill up {x.shape[2]} rows, and give nan")


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check_cudnn(q, k, v)
    if causal and q.shape[2] != k.shape[2]:
        raise RuntimeError("cuDNN's causal mask begins in the first corner")
    out, lse = _forward(*(x.transpose(1, 2) for x in (q, k, v)), scale, causal, None, None, k.shape[2])
    state = torch.zeros((), dtype=torch.int64)
    return _rows_apart(out.transpose(1, 2)), lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], state, state, None


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, bias: None,
    cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_cudnn(dout, q, k, v, out)
    if lse.dtype != torch.float32 or not lse.is_contiguous() or lse.shape != (*q.shape[:3], 1):
        raise RuntimeError(f"cuDNN takes contiguous float32 denominators [b, h, s, 1], not {tuple(lse.shape)}")
    key = (causal, *((x.shape, x.stride()) for x in (q, k, v)))
    if _graphs.setdefault(key, (dout.stride(), out.stride())) != (dout.stride(), out.stride()):
        raise RuntimeError("PyTorch would take a graph that was built for other strides")
    swapped = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    grads = _backward(*swapped, lse.squeeze(-1), scale, causal, None, None, k.shape[2])
    return tuple(_rows_apart(grad.transpose(1, 2)) for grad in grads)


def _rows_apart(x: Tensor) -> Tensor:
    """Lay out [b, h, s, d] as PyTorch lays out cuDNN's results.

    The strides have the order of our queries' strides.
    """
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


KERNELS: dict[Any, Callable] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    torch.ops.aten._flash_attention_forward.default: _flash_forward,
    torch.ops.aten._flash_attention_backward.default: _flash_backward,
}
