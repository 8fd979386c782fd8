"""``a2a``: ranks exchange sequence for heads, attend to whole sequences with a share of the heads, and exchange back.

Before: every rank has its tokens of all heads. After: every rank has all tokens of heads/size query heads and of the
key/value heads that those use. Where there are fewer key/value heads than ranks, several ranks get the same one and
its gradients are summed on the way back. The result is the unsharded one, bit for bit: each head is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
Share = Callable[[int], slice]  # rank -> the heads it works on


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
    """One message a tensor: while one is on its way, the next is packed and the one before unpacked."""

    peers: Peers
    heads: HeadSplit
    order: np.ndarray

    def spread(self, tensors: Sequence[Tensor], shares: Sequence[Share]) -> list[Tensor]:
        """[s_local, b, heads, d] of all heads to [all ranks' tokens, b, this rank's share of the heads, d]."""
        arrivals = [self._start_spread(x, share) for x, share in zip(tensors, shares, strict=True)]
        return [comm.permute_rows(arrival.wait(), self.order) for arrival in arrivals]

    def _start_spread(self, x: Tensor, share: Share) -> comm.Arrival[Tensor]:
        rows, batch, _, dim = x.shape
        parts = [x[:, :, share(rank)] for rank in range(self.peers.size)]
        sizes = [part.numel() for part in parts]
        sent = x.new_empty(sum(sizes))
        for block, part in zip(sent.split(sizes), parts, strict=True):
            block.view_as(part).copy_(part)
        mine = parts[self.peers.rank].shape[2]
        shape = (rows * self.peers.size, batch, mine, dim)
        return comm.all_to_all(sent, sizes, [rows * batch * mine * dim] * self.peers.size, self.peers, shape)

    def collect(self, tensors: Sequence[Tensor], shares: Sequence[Share]) -> Iterator[Iterator[tuple[slice, Tensor]]]:
        """The inverse: for each tensor, each rank's share of the heads and what it computed for this rank's tokens."""
        arrivals = [self._start_collect(x, share) for x, share in zip(tensors, shares, strict=True)]
        for x, share, arrival in zip(tensors, shares, arrivals, strict=True):
            yield self._blocks(x, share, arrival.wait())

    def _start_collect(self, x: Tensor, share: Share) -> comm.Arrival[Tensor]:
        sent = comm.permute_rows(x, self.order, inverse=True).view(-1)
        return comm.all_to_all(
            sent, [sent.numel() // self.peers.size] * self.peers.size, self._sizes(x, share), self.peers
        )

    def _blocks(self, x: Tensor, share: Share, received: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rank, block in enumerate(received.split(self._sizes(x, share))):
            at = share(rank)
            yield at, block.view(x.shape[0] // self.peers.size, x.shape[1], at.stop - at.start, x.shape[3])

    def _sizes(self, x: Tensor, share: Share) -> list[int]:
        one_head = x.shape[0] // self.peers.size * x.shape[1] * x.shape[3]
        return [one_head * (share(rank).stop - share(rank).start) for rank in range(self.peers.size)]


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, exchange: _Exchange) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.shapes = exchange, [x.shape for x in (query, key, value)]
        heads = exchange.heads
        query, key, value = exchange.spread((query, key, value), (heads.query, heads.kv, heads.kv))
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads = ctx.exchange.heads
        collected = ctx.exchange.collect(grads, (heads.query, heads.kv, heads.kv))
        totals = []
        for grad, shape, blocks in zip(grads, ctx.shapes, collected, strict=True):
            # A key/value head that several ranks used gets the sum of their gradients.
            shared = shape[2] < heads.size or shape[2] % heads.size
            dtype = accumulation_dtype(grad.dtype) if shared else grad.dtype
            total = grad.new_zeros(shape, dtype=dtype) if shared else grad.new_empty(shape)
            for at, block in blocks:
                if shared:
                    total[:, :, at] += block
                else:
                    total[:, :, at] = block
            totals.append(total.to(grad.dtype))
        return *totals, None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        (blocks,) = exchange.collect([out], [exchange.heads.query])
        return torch.cat([block for _, block in blocks], dim=2)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.exchange.spread(douts, [ctx.exchange.heads.query]), None
