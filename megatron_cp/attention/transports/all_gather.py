"""``all_gather``: attend to gathered keys and values of all ranks.

The only transport whose memory grows with the group: for the gathered keys and values, and in the backward pass (which
gathers again rather than save them) for their gradients, which are then summed over ranks and scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.dispatch import attend, attend_backward, backward_tiles, forward_tiles
from megatron_cp.attention.merge import Gradient, OutputAccumulator, softmax_offset_grad
from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.sharding import Layout
from megatron_cp.attention.tables import regroup_rows
from megatron_cp.attention.tiles import plan_gathered
from megatron_cp.attention.transports import comm
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.attention.transports.pieces import pieces_attention


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax_offset: Tensor | None, call: AttentionCall, peers: Peers
) -> Tensor:
    """Attend with local queries to all ranks' keys and values: [s_local, b, h, d]."""
    if isinstance(call.layout, PlacedLayout):
        return pieces_attention(query, key, value, softmax_offset, call, peers, one_by_one=False)
    return _AllGather.apply(query, key, value, softmax_offset, call, peers)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, offset: Tensor | None, call: AttentionCall, peers: Peers
    ) -> Tensor:
        if call.known is not None:
            out, lse = call.known
        else:
            gathered = _gather(key, value, call, peers)
            result = OutputAccumulator(query, value.shape[-1])
            work = plan_gathered(call.layout, peers.rank, call.mask, forward_tiles(query, call))
            attend(query, gathered, work, call, into=result)
            out, lse = result.finish(offset)
            call.keep(lse)
        ctx.save_for_backward(query, key, value, out, lse, offset)
        ctx.call, ctx.peers = call, peers
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, offset = ctx.saved_tensors
        (dout,), call, peers = douts, ctx.call, ctx.peers
        keys, values = _gather(key, value, call, peers)
        dquery, dkeys, dvalues = Gradient(query), Gradient(keys), Gradient(values)
        work = plan_gathered(call.layout, peers.rank, call.mask, backward_tiles(query, call))
        attend_backward(dout, query, (keys, values), out, lse, work, call, into=(dquery, dkeys, dvalues))
        gradients = [dkeys.total(), dvalues.total()]
        del keys, values, dkeys, dvalues  # as large as all ranks' keys and values: copies of gradients come next
        dkey, dvalue = _scatter(gradients, call, peers)
        doffset = softmax_offset_grad(offset, out, dout, lse, call.real_rows(peers.rank))
        return dquery.finish(), dkey.to(key.dtype), dvalue.to(value.dtype), doffset, None, None


def _gather(key: Tensor, value: Tensor, call: AttentionCall, peers: Peers) -> tuple[Tensor, Tensor]:
    """Gather all ranks' keys and values, in the order of ``Layout.gathered_spans``."""
    assert isinstance(call.layout, Layout)
    parts = 2 if call.layout.is_dense else 1
    arriving = []
    for index, x in enumerate((key, value)):
        out = x.new_empty((peers.size * x.shape[0], *x.shape[1:]))
        arriving.append(comm.all_gather(x.chunk(parts), out.chunk(parts), out, peers, index))
    keys, values = (arrival.wait() for arrival in arriving)
    if call.layout.is_dense:
        return keys, values
    return regroup_rows(keys, call.layout, peers.size), regroup_rows(values, call.layout, peers.size)


def _scatter(gradients: list[Tensor], call: AttentionCall, peers: Peers) -> Iterator[Tensor]:
    """Yield this rank's rows of gathered gradients, summed over ranks in rank order.

    Empties the list, so that a gradient is freed when a copy in another order exists.
    """
    assert isinstance(call.layout, Layout)
    parts = 2 if call.layout.is_dense else 1
    arriving = []
    for index in range(len(gradients)):
        gradient = gradients.pop(0)
        if not call.layout.is_dense:
            gradient = regroup_rows(gradient, call.layout, peers.size, inverse=True)
        by_rank = list(zip(*(part.chunk(peers.size) for part in gradient.chunk(parts)), strict=True))
        own = torch.cat(by_rank[peers.rank])
        received = [own if rank == peers.rank else torch.empty_like(own) for rank in range(peers.size)]
        arriving.append(comm.exchange(by_rank, [x.chunk(parts) for x in received], received, peers, index))
    for arrival in arriving:
        total, *others = arrival.wait()
        for other in others:
            total += other
        yield total
