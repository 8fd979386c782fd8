"""Attention written out, for tests and the start-up probe: whole sequences, all scores, any dtype, one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    cu_seqlens_padded: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    softmax_offset: Tensor | None = None,
) -> Tensor:
    """What :func:`~megatron_cp.attention.context_parallel_attention` must give, unsharded and in the inputs' dtype.

    ``query`` [s, b, heads, d_qk], ``key`` and ``value`` with kv_heads; with ``cu_seqlens`` packs [t, heads, d]. Needs
    memory for all scores; meant for float64.
    """
    if cu_seqlens is not None:
        padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        pieces = []
        for index in range(len(cu_seqlens) - 1):
            start, length = padded[index], cu_seqlens[index + 1] - cu_seqlens[index]
            q, k, v = (x[start : start + length].unsqueeze(1) for x in (query, key, value))
            out = _attend(q, k, v, causal, window_size, softmax_scale, softmax_offset).squeeze(1)
            pieces.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padded[index + 1] - start - length)))
        pieces.append(query.new_zeros((query.shape[0] - padded[-1], query.shape[1], value.shape[-1])))
        return torch.cat(pieces)
    return _attend(query, key, value, causal, window_size, softmax_scale, softmax_offset)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window_size: tuple[int, int] | None,
    scale: float | None,
    offset: Tensor | None,
) -> Tensor:
    s, b, heads, dim = query.shape
    groups = heads // key.shape[2]
    key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * (1 / math.sqrt(dim) if scale is None else scale)
    distance = torch.arange(s, device=query.device) - torch.arange(s, device=query.device)[:, None]
    left, right = (-1, -1) if window_size is None else window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    if offset is not None:
        sink = offset.to(scores.dtype)[None, :, None, None].expand(b, heads, s, 1)
        probabilities = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", probabilities, value)
