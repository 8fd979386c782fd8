"""Exchange sequence for heads, attend, and exchange back: the level of heads.

Before: every rank has its tokens of all heads. After: every rank has all tokens of heads/size query heads and their
key/value heads. With fewer key/value heads than ranks, several ranks get the same one, and its gradients are summed on
the way back. Each head is computed whole, so nothing is merged.

``a2a`` is this level alone. ``a2a+p2p`` exchanges within groups of neighbours, with a ring between groups: a group then
holds the zigzag shard of one rank of that ring, with a share of the heads. A hop of it carries as much as one of a flat
ring. There are p2p - 1 hops instead of a2a * p2p - 1, and only they use slow links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.heads import HeadSplit
from megatron_cp.attention.merge import accumulation_dtype
from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.sharding import Layout, RowRun, regroup_runs
from megatron_cp.attention.tables import regroup_rows
from megatron_cp.attention.transports import comm
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.parallel.transfer import send

Inner = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionCall], Tensor]
Share = Callable[[int], slice]  # rank -> heads of the rank
Step = Callable[[Sequence[Tensor], Sequence[Share]], list[Tensor]]
Arrival = Callable[[], list[Tensor]]  # waits for messages, once


def with_heads_exchanged(
    inner: Inner,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_offset: Tensor | None,
    call: AttentionCall,
    peers: Peers,
) -> Tensor:
    """Call ``inner`` on all tokens with this rank's share of heads, and exchange back.

    Differentiable. Query heads must divide by the size of ``peers``.
    """
    if peers.size == 1:
        return inner(query, key, value, softmax_offset, call)
    exchange = HeadExchange.of(query.shape[2], key.shape[2], call, peers)
    there, back, shares = exchange.spread, exchange.collect, exchange.shares
    query, key, value = _Exchanged.apply(there, back, shares, query, key, value)
    out = exchange.attend(inner, query, key, value, softmax_offset, call)
    return _Exchanged.apply(back, there, shares[:1], out)[0]


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Messages between sequence and heads, of all tensors at once.

    Rows are received in place: ``runs`` lists the rows of each rank in the common shard. A ``pack`` would need a
    message a chunk, so it is received rank by rank and then reordered.
    """

    peers: Peers
    heads: HeadSplit
    runs: Sequence[Sequence[RowRun]]
    pack: Layout | None

    @classmethod
    def of(cls, heads: int, kv_heads: int, call: AttentionCall, peers: Peers) -> HeadExchange:
        split, layout = HeadSplit.of(heads, kv_heads, peers.size), call.layout
        if layout.is_dense:
            return cls(peers, split, regroup_runs(layout, peers.size), None)
        one_by_one = [[RowRun(0, rank * layout.rows, layout.rows)] for rank in range(peers.size)]
        # Groups of neighbours in a placed layout have their rows in rank order.
        return cls(peers, split, one_by_one, None if isinstance(layout, PlacedLayout) else layout)

    @property
    def shares(self) -> tuple[Share, Share, Share]:
        """Heads of each rank: of queries, keys and values."""
        return self.heads.query, self.heads.kv, self.heads.kv

    @property
    def mine(self) -> Sequence[RowRun]:
        return self.runs[self.peers.rank]

    def attend(
        self, inner: Inner, query: Tensor, key: Tensor, value: Tensor, offset: Tensor | None, call: AttentionCall
    ) -> Tensor:
        """Call ``inner`` on exchanged tensors; offset and ``call`` are of all heads."""
        heads = self.heads.query(self.peers.rank)
        expand = self.heads.expansion(self.peers.rank)
        if expand is not None:
            index = send(torch.tensor(expand), key.device)
            key, value = key.index_select(2, index), value.index_select(2, index)
        common = replace(
            call,
            layout=call.layout.resized(call.layout.size // self.peers.size),
            max_logits=None if call.max_logits is None else call.max_logits[heads],  # a view
        )
        return inner(query, key, value, None if offset is None else offset[heads], common)

    def spread(self, tensors: Sequence[Tensor], shares: Sequence[Share]) -> list[Tensor]:
        """Exchange [s_local, b, heads, d] for [all tokens, b, this rank's heads, d]."""
        return self.start_spread(tensors, shares)()

    def start_spread(self, tensors: Sequence[Tensor], shares: Sequence[Share], turn: int = 0) -> Arrival:
        """Start :meth:`spread`; exchanges that overlap need different ``turn``."""
        outgoing: list[list[Tensor]] = [[] for _ in self.runs]
        incoming: list[list[Tensor]] = [[] for _ in self.runs]
        shards = []
        for x, share in zip(tensors, shares, strict=True):
            parts = [x[:, :, share(rank)] for rank in range(self.peers.size)]
            mine = parts[self.peers.rank]
            shard = x.new_empty((x.shape[0] * self.peers.size, *mine.shape[1:]))
            for run in self.mine:
                shard[run.common] = mine[run.rows]
            for sent, part in zip(outgoing, parts, strict=True):
                sent += [part[run.rows] for run in self.mine]
            for received, runs in zip(incoming, self.runs, strict=True):
                received += [shard[run.common] for run in runs]
            shards.append(shard)
        arrival = comm.exchange(outgoing, incoming, shards, self.peers, 2 * turn)
        if self.pack is None:
            return arrival.wait
        pack, size = self.pack, self.peers.size
        return lambda: [regroup_rows(shard, pack, size) for shard in arrival.wait()]

    def collect(self, tensors: Sequence[Tensor], shares: Sequence[Share]) -> list[Tensor]:
        """Invert :meth:`spread`; sum heads that several ranks computed."""
        return self.start_collect(tensors, shares)()

    def start_collect(self, tensors: Sequence[Tensor], shares: Sequence[Share], turn: int = 0) -> Arrival:
        """Start :meth:`collect`; exchanges that overlap need different ``turn``."""
        outgoing: list[list[Tensor]] = [[] for _ in self.runs]
        incoming: list[list[Tensor]] = [[] for _ in self.runs]
        for x, share in zip(tensors, shares, strict=True):
            if self.pack is not None:
                x = regroup_rows(x, self.pack, self.peers.size, inverse=True)
            for rank, runs in enumerate(self.runs):
                outgoing[rank] += [x[run.common] for run in runs]
                if rank == self.peers.rank:
                    incoming[rank] += outgoing[rank][-len(runs) :]
                    continue
                heads = share(rank).stop - share(rank).start
                incoming[rank] += [x.new_empty((run.length, x.shape[1], heads, x.shape[3])) for run in self.mine]
        arrival = comm.exchange(outgoing, incoming, incoming, self.peers, 2 * turn + 1)
        return lambda: self._join_all(arrival.wait(), shares)

    def _join_all(self, parts: list[list[Tensor]], shares: Sequence[Share]) -> list[Tensor]:
        runs = len(self.mine)
        starts = range(0, runs * len(shares), runs)
        return [
            self._join([of_rank[start : start + runs] for of_rank in parts], share)
            for start, share in zip(starts, shares, strict=True)
        ]

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
