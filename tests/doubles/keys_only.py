"""Transport unknown to the package, in which attention weights are sent.

The whole transport is in this file. Weights are sent to the ranks that have the values. Keys are gathered. Each rank
computes the weights of its queries on all keys and sends every rank the weights on that rank's keys. That rank
multiplies them with its values, which it never sends, and returns partial outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.attention.transports.registry import KEYS, CostTerms, Transport

KEYS_ONLY = Transport(
    "keys_only", run=f"{__name__}:keys_only_attention", levels=(KEYS,), cost=CostTerms(hops=False), other_names=("kv",)
)


def keys_only_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax_offset: Tensor | None, call: AttentionCall, peers: Peers
) -> Tensor:
    """Attend from this rank's queries to all ranks' keys; differentiable.

    Query, key and value are [s_local, b, h, d].
    """
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    keys = _Swap.apply(key.expand(peers.size, *key.shape), peers.group)
    allowed = _allowed(call, peers)[:, None, None]
    scores = torch.einsum("qbhd,rkbhd->rbhqk", query, keys) * call.scale
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).movedim(0, -2)
    columns = scores.flatten(-2)
    if softmax_offset is not None:
        columns = torch.cat([columns, softmax_offset[:, None, None].expand(*columns.shape[:-1], 1)], -1)
    weights = columns.softmax(-1)[..., : peers.size * key.shape[0]].unflatten(-1, scores.shape[-2:]).movedim(-2, 0)
    parts = torch.einsum("rbhqk,kbhd->rqbhd", _Swap.apply(weights * allowed, peers.group), value)
    return _Swap.apply(parts, peers.group).sum(0)


def _allowed(call: AttentionCall, peers: Peers) -> Tensor:
    """Return the mask [ranks, own queries, their keys]."""
    sequences, positions = torch.full((2, peers.size, call.layout.rows), -1)
    for rank in range(peers.size):
        for span in call.layout.spans(rank):
            rows = slice(span.row, span.row + span.length)
            sequences[rank, rows] = span.sequence
            positions[rank, rows] = torch.arange(span.position, span.position + span.length)
    ahead = positions[:, None, :] - positions[peers.rank, None, :, None]
    seen = (sequences[:, None, :] == sequences[peers.rank, None, :, None]) & (sequences[:, None, :] >= 0)
    seen &= ahead <= (call.layout.rows * peers.size if call.mask.right is None else call.mask.right)
    return seen if call.mask.left is None else seen & (ahead >= -call.mask.left)


class _Swap(torch.autograd.Function):
    """Exchange [ranks, ...]: send each rank its slice, and receive one from each."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, theirs = group, torch.empty(mine.shape, dtype=mine.dtype)
        dist.all_to_all_single(theirs, mine.contiguous(), group=group)
        return theirs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Swap.apply(grad, ctx.group), None
