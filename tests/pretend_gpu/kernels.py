"""PyTorch's kernels that exist on CUDA alone and that our attention calls, computed by the rule of their signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool, left: int | None, right: int | None) -> Tensor:
    """[b, h, s, s'] in float32 of [b, s, h, d], the window counted from the diagonal that ends in the last corner."""
    heads = q.shape[2] // k.shape[2]
    q, k = (x.float().transpose(1, 2) for x in (q, k))
    scores = q @ k.repeat_interleave(heads, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    rows, columns = scores.shape[-2:]
    distance = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    right = 0 if causal else right
    left, right = (None if limit is None or not 0 <= limit < columns else limit for limit in (left, right))
    if left is not None and right is None:
        right = columns  # as FlashAttention sets it, which binds where a tile is higher than wide
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


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **unused: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(q, k, v)
    scores = _scores(q, k, scale, causal, window_size_left, window_size_right)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    values = v.float().transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1)
    out = (probabilities @ values).transpose(1, 2).to(q.dtype).contiguous()
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, state.clone(), torch.empty(0, dtype=q.dtype)


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(dout, q, k, v, out)
    if lse.dtype != torch.float32 or not lse.is_contiguous():
        raise RuntimeError("FlashAttention takes contiguous float32 denominators")
    kv_heads, heads = k.shape[2], q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = _scores(q, k, scale, causal, window_size_left, window_size_right)
    probabilities = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    do, o, queries, keys, values = (x.float().transpose(1, 2) for x in (dout, out, q, k, v))
    keys, values = (x.repeat_interleave(heads, 1) for x in (keys, values))
    dscores = probabilities * (do @ values.mT - (do * o).sum(-1, keepdim=True)) * scale
    dq, dk, dv = dscores @ keys, dscores.mT @ queries, probabilities.mT @ do
    dk, dv = (x.unflatten(1, (kv_heads, heads)).sum(2) for x in (dk, dv))
    return tuple(x.transpose(1, 2).to(q.dtype).contiguous() for x in (dq, dk, dv))  # type: ignore[return-value]


KERNELS: dict[Any, Callable] = {
    torch.ops.aten._flash_attention_forward.default: _flash_forward,
    torch.ops.aten._flash_attention_backward.default: _flash_backward,
}
