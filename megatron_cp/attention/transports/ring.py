"""``p2p``: keys and values travel around a ring.

At each stop the rank attends to the received keys and values and merges the result, while the next ones arrive. Stops
at which no rank sees anything are skipped by a longer hop. The backward pass saves the last received block instead of
the rank's own, and runs the ring in reverse, so that each block and its gradients end at their rank: as many hops as in
the forward pass.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.dispatch import (
    as_read,
    attend,
    attend_backward,
    backward_tiles,
    by_row,
    forward_tiles,
)
from megatron_cp.attention.merge import Gradient, OutputAccumulator, softmax_offset_grad
from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.tiles import plan, ring_shifts
from megatron_cp.attention.transports import comm
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.attention.transports.pieces import pieces_attention


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax_offset: Tensor | None, call: AttentionCall, peers: Peers
) -> Tensor:
    """Attend with local queries to all ranks' keys and values: [s_local, b, h, d]."""
    if isinstance(call.layout, PlacedLayout) and peers.size > 1:
        return pieces_attention(query, key, value, softmax_offset, call, peers, one_by_one=True)
    return _Ring.apply(query, key, value, softmax_offset, call, peers)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, offset: Tensor | None, call: AttentionCall, peers: Peers
    ) -> Tensor:
        stops = ring_shifts(call.layout, call.mask)
        visitor = as_read(key), as_read(value)
        if len(stops) > 1:  # sent and received in this memory order, equal at all stops
            visitor = visitor[0].contiguous(), visitor[1].contiguous()
        if call.known is not None:
            out, lse = call.known
            if len(stops) > 1:  # the last received block, in one hop
                visitor = comm.hop(visitor, stops[-1] - stops[0], peers, comm.KV_TAG).wait()
        else:
            result = OutputAccumulator(query, value.shape[-1])
            size = forward_tiles(query, call)
            for stop, onward in zip(stops, _hops(stops), strict=True):
                arriving = comm.hop(visitor, onward, peers, comm.KV_TAG) if onward else None
                work = plan(call.layout, peers.rank, (peers.rank - stop) % peers.size, call.mask, size)
                attend(query, by_row(visitor), work, call, into=result)
                if arriving is not None:
                    visitor = arriving.wait()
            out, lse = result.finish(offset)
            call.keep(lse)
        ctx.save_for_backward(query, *visitor, out, lse, offset)
        ctx.call, ctx.peers = call, peers
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        query, *visitor, out, lse, offset = ctx.saved_tensors
        (dout,), call, peers = douts, ctx.call, ctx.peers
        stops = ring_shifts(call.layout, call.mask)[::-1]
        returning = None
        like = by_row(visitor)
        dquery, dkey, dvalue = map(Gradient, (query, *like))
        for stop, onward in zip(stops, _hops(stops), strict=True):
            arriving = comm.hop(visitor, onward, peers, comm.KV_TAG) if onward else None
            source = (peers.rank - stop) % peers.size
            work = plan(call.layout, peers.rank, source, call.mask, backward_tiles(query, call))
            attend_backward(dout, query, by_row(visitor), out, lse, work, call, into=(dquery, dkey, dvalue))
            if returning is not None:
                for own, others in zip((dkey, dvalue), returning.wait(), strict=True):
                    own.add_all(others)
            if arriving is not None:
                returning = comm.hop((dkey.total(), dvalue.total()), onward, peers, comm.GRAD_TAG)
                dkey, dvalue = map(Gradient, like)
                visitor = arriving.wait()
        doffset = softmax_offset_grad(offset, out, dout, lse, call.real_rows(peers.rank))
        return dquery.finish(), dkey.finish(), dvalue.finish(), doffset, None, None


def _hops(stops: tuple[int, ...]) -> list[int]:
    """Return the distance from each stop to the next; 0 at the last."""
    return [*(after - stop for stop, after in pairwise(stops)), 0]
