"""``a2a``: exchange sequence for heads, attend, and exchange back.

Before: every rank has its tokens of all heads. After: every rank has all tokens of heads/size query heads and their
key/value heads. With fewer key/value heads than ranks, several ranks get the same one, and its gradients are summed on
the way back. Each head is computed whole, so nothing is merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall, SavedResult
from megatron_cp.attention.heads import HeadSplit
from megatron_cp.attention.merge import accumulation_dtype
from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.attention.placement.layout import AnyLayout, PlacedLayout
from megatron_cp.attention.sharding import Layout, RowRun, regroup_runs
from megatron_cp.attention.tables import regroup_rows
from megatron_cp.attention.transports import comm
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.attention.transports.ring import ring_attention
from megatron_cp.parallel.transfer import send

Inner = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionCall], Tensor]
Share = Callable[[int], slice]  # rank -> heads of the rank
Step = Callable[[Sequence[Tensor], Sequence[Share]], list[Tensor]]


def all_to_all_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax_offset: Tensor | None, call: AttentionCall, peers: Peers
) -> Tensor:
    """Attend to all ranks' tokens with a share of heads; differentiable."""
    return with_heads_exchanged(_attend_alone, query, key, value, softmax_offset, call, peers)


def with_heads_exchanged(
    inner: Inner,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_offset: Tensor | None,
    call: AttentionCall,
    peers: Peers,
) -> Tensor:
    """Call ``inner`` on all tokens with this rank's share of heads, and exchange back."""
    if peers.size == 1:
        return inner(query, key, value, softmax_offset, call)
    heads = HeadSplit.of(query.shape[2], key.shape[2], peers.size)
    exchange = _Exchange.of(peers, call.layout)
    shares = heads.query, heads.kv, heads.kv
    query, key, value = _Exchanged.apply(exchange.spread, exchange.collect, shares, query, key, value)
    if softmax_offset is not None:
        softmax_offset = softmax_offset[heads.query(peers.rank)]
    expand = heads.expansion(peers.rank)
    if expand is not None:
        index = send(torch.tensor(expand), key.device)
        key, value = key.index_select(2, index), value.index_select(2, index)
    common = replace(call, layout=call.layout.resized(call.layout.size // peers.size))
    if call.max_logits is not None:
        common = replace(common, max_logits=call.max_logits[heads.query(peers.rank)])  # a view
    collect: Step = exchange.collect
    if call.known is not None:
        known, lse = call.known
        common = replace(common, saved=SavedResult(lse, *exchange.spread((known,), (heads.query,))))
        collect = lambda tensors, shares: [known]  # noqa: E731 - no message: it is here
    out = inner(query, key, value, softmax_offset, common)
    return _Exchanged.apply(collect, exchange.spread, (heads.query,), out)[0]


def _attend_alone(query: Tensor, key: Tensor, value: Tensor, offset: Tensor | None, call: AttentionCall) -> Tensor:
    return ring_attention(query, key, value, offset, call, Peers.alone())


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Messages between sequence and heads, of all tensors at once.

    Rows are received in place: ``runs`` lists the rows of each rank in the common shard. A ``pack`` would need a
    message a chunk, so it is received rank by rank and then reordered.
    """

    peers: Peers
    runs: Sequence[Sequence[RowRun]]
    pack: Layout | None

    @classmethod
    def of(cls, peers: Peers, layout: AnyLayout) -> _Exchange:
        if layout.is_dense:
            return cls(peers, regroup_runs(layout, peers.size), None)
        one_by_one = [[RowRun(0, rank * layout.rows, layout.rows)] for rank in range(peers.size)]
        if isinstance(layout, PlacedLayout):  # groups of neighbours have their rows in rank order
            return cls(peers, one_by_one, None)
        return cls(peers, one_by_one, layout)

    @property
    def mine(self) -> Sequence[RowRun]:
        return self.runs[self.peers.rank]

    def spread(self, tensors: Sequence[Tensor], shares: Sequence[Share]) -> list[Tensor]:
        """Exchange [s_local, b, heads, d] for [all tokens, b, this rank's heads, d]."""
        arrivals = [self._start_spread(*each, index) for index, each in enumerate(zip(tensors, shares, strict=True))]
        shards = [arrival.wait() for arrival in arrivals]
        if self.pack is None:
            return shards
        return [regroup_rows(shard, self.pack, self.peers.size) for shard in shards]

    def _start_spread(self, x: Tensor, share: Share, index: int) -> comm.PendingReceive[Tensor]:
        parts = [x[:, :, share(rank)] for rank in range(self.peers.size)]
        mine = parts[self.peers.rank]
        shard = x.new_empty((x.shape[0] * self.peers.size, *mine.shape[1:]))
        outgoing = [[part[run.rows] for run in self.mine] for part in parts]
        incoming = [[shard[run.common] for run in runs] for runs in self.runs]
        arrival = comm.exchange(outgoing, incoming, shard, self.peers, index)
        for run in self.mine:
            shard[run.common] = mine[run.rows]
        return arrival

    def collect(self, tensors: Sequence[Tensor], shares: Sequence[Share]) -> list[Tensor]:
        """Invert :meth:`spread`; sum heads that several ranks computed."""
        arrivals = [self._start_collect(*each, index) for index, each in enumerate(zip(tensors, shares, strict=True))]
        return [self._join(arrival.wait(), share) for arrival, share in zip(arrivals, shares, strict=True)]

    def _start_collect(self, x: Tensor, share: Share, index: int) -> comm.PendingReceive[list[list[Tensor]]]:
        if self.pack is not None:
            x = regroup_rows(x, self.pack, self.peers.size, inverse=True)
        outgoing = [[x[run.common] for run in runs] for runs in self.runs]
        incoming = [
            [x.new_empty((run.length, x.shape[1], heads.stop - heads.start, x.shape[3])) for run in self.mine]
            for heads in map(share, range(self.peers.size))
        ]
        incoming[self.peers.rank] = outgoing[self.peers.rank]
        return comm.exchange(outgoing, incoming, incoming, self.peers, index)

    def _join(self, parts: list[list[Tensor]], share: Share) -> Tensor:
        """Join ``parts``: each rank's results for each of this rank's runs."""
        size, like = self.peers.size, parts[0][0]
        shape = (sum(run.length for run in self.mine), like.shape[1], share(size - 1).stop, like.shape[3])
        if all(share(rank).stop == share(rank + 1).start for rank in range(size - 1)):
            whole = like.new_empty(shape)
            for rank, run, part in self._places(parts):
                whole[run.rows, :, share(rank)] = part
            return whole
        total = like.new_zeros(shape, dtype=accumulation_dtype(like.dtype))
        for rank, run, part in self._places(parts):
            total[run.rows, :, share(rank)].add_(part)
        return total.to(like.dtype)

    def _places(self, parts: list[list[Tensor]]) -> Iterator[tuple[int, RowRun, Tensor]]:
        for rank, pieces in enumerate(parts):
            for run, piece in zip(self.mine, pieces, strict=True):
                yield rank, run, piece


class _Exchanged(torch.autograd.Function):
    """Apply ``there(tensors, shares)``, and exchange gradients back."""

    @staticmethod
    def forward(ctx: Any, there: Step, back: Step, shares: Sequence[Share], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back, ctx.shares = back, shares
        return tuple(there(tensors, shares))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(grads, ctx.shares)
