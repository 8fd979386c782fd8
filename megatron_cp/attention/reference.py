"""Plain attention for tests and the start-up probe, on one rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softmax_offset: Tensor | None = None,
) -> Tensor:
    """Compute attention without sharding, in the inputs' dtype.

    ``query`` [s, b, heads, d_qk], ``key`` and ``value`` with kv_heads, in the inputs' dtype. Needs memory for all
    scores; meant for float64.
    """
    s, b, heads, dim = query.shape
    groups = heads // key.shape[2]
    key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
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
    if softmax_offset is not None:
        sink = softmax_offset.to(scores.dtype)[None, :, None, None].expand(b, heads, s, 1)
        probabilities = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", probabilities, value)
