"""``a2a``: ranks exchange sequence for heads, attend to whole sequences with a share of the heads, and exchange back.

Before: every rank has its tokens of all heads. After: every rank has all tokens of heads/size query heads and of the
key/value heads that those use. Where there are fewer key/value heads than ranks, several ranks get the same one and
its gradients are summed on the way back. The result is the unsharded one, bit for bit: each head is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attention import comm
from megatron_cp.attention.comm import Peers
from megatron_cp.attention.context import Problem
from megatron_cp.attention.merge import accumulation_dtype
from megatron_cp.attention.ring import ring_attention
from megatron_cp.attention.sharding import regroup_order

Inner = Callable[[Tensor, Tensor, Tensor, Tensor | None, Problem], Tensor]


def all_to_all_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax_offset: Tensor | None, problem: Problem, peers: Peers
) -> Tensor:
    """Attention over all ranks' tokens, [s_local, b, h, d]; differentiable. Query heads must divide by ranks."""
    return with_heads_exchanged(_attend_alone, query, key, value, softmax_offset, problem, peers)


def with_heads_exchanged(
    inner: Inner,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_offset: Tensor | None,
    problem: Problem,
    peers: Peers,
) -> Tensor:
    """Call ``inner`` on the tokens of all ``peers`` with this rank's share of the heads, and bring its output back."""
    if peers.size == 1:
        return inner(query, key, value, softmax_offset, problem)
    heads = HeadSplit.of(query.shape[2], key.shape[2], peers.size)
    exchange = _Exchange(peers, heads, regroup_order(problem.layout, peers.size))
    query, key, value = _SequenceToHeads.apply(query, key, value, exchange)
    if softmax_offset is not None:
        softmax_offset = softmax_offset[heads.query(peers.rank)]
    expand = heads.expansion(peers.rank)
    if expand is not None:
        index = torch.tensor(expand, device=key.device)
        key, value = key.index_select(2, index), value.index_select(2, index)
    common = replace(problem, layout=problem.layout.resized(problem.layout.size // peers.size))
    return _HeadsToSequence.apply(inner(query, key, value, softmax_offset, common), exchange)


def _attend_alone(query: Tensor, key: Tensor, value: Tensor, offset: Tensor | None, problem: Problem) -> Tensor:
    return ring_attention(query, key, value, offset, problem, Peers.alone())


@dataclass(frozen=True)
class HeadSplit:
    """Which query and key/value heads each of ``size`` ranks works on."""

    heads: int
    kv_heads: int
    size: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, size: int) -> HeadSplit:
        if heads % size:
            divisors = [n for n in range(1, size + 1) if heads % n == 0]
            raise ValueError(
                f"query has {heads} heads on this rank, which do not divide by the all-to-all group's {size} ranks; "
                f"use a group of {' or '.join(map(str, divisors))}, or comm_type 'p2p' or 'all_gather'"
            )
        return cls(heads, kv_heads, size)

    def query(self, rank: int) -> slice:
        share = self.heads // self.size
        return slice(rank * share, (rank + 1) * share)

    def kv(self, rank: int) -> slice:
        """The key/value heads that the rank's query heads use."""
        group, mine = self.heads // self.kv_heads, self.query(rank)
        return slice(mine.start // group, (mine.stop - 1) // group + 1)

    def expansion(self, rank: int) -> list[int] | None:
        """Where the rank's query heads do not share its key/value heads evenly: the local one that each uses."""
        mine, kv = self.query(rank), self.kv(rank)
        used = [head // (self.heads // self.kv_heads) - kv.start for head in range(mine.start, mine.stop)]
        count = kv.stop - kv.start
        if len(used) % count == 0 and used == [index // (len(used) // count) for index in range(len(used))]:
            return None
        return used


@dataclass(frozen=True, eq=False)
class _Exchange:
    peers: Peers
    heads: HeadSplit
    order: np.ndarray

    def spread(self, pieces: Callable[[int], Sequence[Tensor]]) -> list[Tensor]:
        """Send ``pieces(rank)``, each [s_local, b, heads, d], to every rank; mine, with the tokens of all ranks."""
        outgoing = [pieces(rank) for rank in range(self.peers.size)]
        rows, batch = outgoing[0][0].shape[:2]
        widths = [sum(piece.shape[2] * piece.shape[3] for piece in parts) for parts in outgoing]
        sizes = [rows * batch * width for width in widths]
        sent = outgoing[0][0].new_empty(sum(sizes))
        for block, parts in zip(sent.split(sizes), outgoing, strict=True):
            torch.cat([piece.flatten(2) for piece in parts], dim=2, out=block.view(rows, batch, -1))
        mine = sizes[self.peers.rank]
        received = comm.all_to_all(sent, sizes, [mine] * self.peers.size, self.peers).wait()
        joined = received.view(rows * self.peers.size, batch, -1)
        shapes = [piece.shape[2:] for piece in outgoing[self.peers.rank]]
        # Each part gets memory of its own: one kept for the backward pass must not keep the others.
        parts = joined.split([heads * dim for heads, dim in shapes], dim=2)
        return [
            comm.permute_rows(part, self.order).unflatten(2, tuple(shape))
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def collect(self, joined: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """The inverse: from ``joined`` [all ranks' tokens, b, features], this rank's tokens of each rank's features."""
        rows, batch = joined.shape[0] // self.peers.size, joined.shape[1]
        sent = comm.permute_rows(joined, self.order, inverse=True).view(-1)
        sizes = [rows * batch * width for width in widths]
        mine = sizes[self.peers.rank]
        received = comm.all_to_all(sent, [mine] * self.peers.size, sizes, self.peers).wait()
        return [block.view(rows, batch, -1) for block in received.split(sizes)]


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, exchange: _Exchange) -> tuple[Tensor, ...]:
        heads = exchange.heads
        ctx.exchange, ctx.shapes = exchange, [x.shape for x in (query, key, value)]

        def pieces(to: int) -> Sequence[Tensor]:
            return query[:, :, heads.query(to)], key[:, :, heads.kv(to)], value[:, :, heads.kv(to)]

        query, key, value = exchange.spread(pieces)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, heads = ctx.exchange, ctx.exchange.heads
        dims = [shape[3] for shape in ctx.shapes]
        counts = [_counts(heads, rank) for rank in range(heads.size)]
        widths = [sum(n * d for n, d in zip(count, dims, strict=True)) for count in counts]
        received = exchange.collect(torch.cat([grad.flatten(2) for grad in grads], dim=2), widths)
        dtype = grads[0].dtype
        dquery = grads[0].new_empty(ctx.shapes[0])
        dkey, dvalue = (grads[0].new_zeros(shape, dtype=accumulation_dtype(dtype)) for shape in ctx.shapes[1:])
        for rank, (block, count) in enumerate(zip(received, counts, strict=True)):
            parts = block.split([n * d for n, d in zip(count, dims, strict=True)], dim=2)
            dq, dk, dv = (x.unflatten(2, (n, d)) for x, n, d in zip(parts, count, dims, strict=True))
            dquery[:, :, heads.query(rank)] = dq
            dkey[:, :, heads.kv(rank)] += dk
            dvalue[:, :, heads.kv(rank)] += dv
        return dquery, dkey.to(dtype), dvalue.to(dtype), None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.dim = exchange, out.shape[3]
        blocks = exchange.collect(out.flatten(2), [out.shape[2] * out.shape[3]] * exchange.peers.size)
        return torch.cat([block.unflatten(2, (-1, ctx.dim)) for block in blocks], dim=2)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        exchange, dout = ctx.exchange, douts[0]
        (joined,) = exchange.spread(lambda rank: [dout[:, :, exchange.heads.query(rank)]])
        return joined, None


def _counts(heads: HeadSplit, rank: int) -> tuple[int, int, int]:
    kv = heads.kv(rank)
    return heads.heads // heads.size, kv.stop - kv.start, kv.stop - kv.start
