"""``p2p`` and ``all_gather`` of a pack in pieces: send only rows that are seen.

Rows go directly from the rank that has them to each rank that needs them. Stages are distances between ranks: one each
(``p2p``), so that a rank computes while the next rows arrive, or all at once (``all_gather``). The rank's own keys come
first, while those of the first stage arrive. The backward pass sends the rows again rather than save them, and returns
their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.dispatch import (
    KeyValue,
    as_read,
    attend,
    attend_backward,
    backward_tiles,
    by_row,
    forward_tiles,
)
from megatron_cp.attention.merge import Gradient, OutputAccumulator, accumulation_dtype, softmax_offset_grad
from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.attention.tiles import TilePlan, TileSize, plan, plan_seen, ring_shifts, seen
from megatron_cp.attention.transports import comm
from megatron_cp.attention.transports.comm import Peers

Stage = tuple[int, ...]  # distances to the ranks that rows come from


def pieces_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_offset: Tensor | None,
    call: AttentionCall,
    peers: Peers,
    *,
    one_by_one: bool,
) -> Tensor:
    """Attend with local queries to all ranks' keys and values: [s_local, b, h, d].

    Differentiable. ``one_by_one``: a stage for each rank that rows come from; otherwise one stage.
    """
    distances = ring_shifts(call.layout, call.mask)[1:]
    stages = [(distance,) for distance in distances] if one_by_one else [distances] if distances else []
    return _Pieces.apply(query, key, value, softmax_offset, call, peers, stages)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offset: Tensor | None,
        call: AttentionCall,
        peers: Peers,
        stages: list[Stage],
    ) -> Tensor:
        out, lse = call.known or _forward(query, key, value, offset, call, peers, stages)
        ctx.save_for_backward(query, key, value, out, lse, offset)
        ctx.call, ctx.peers, ctx.stages = call, peers, stages
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, offset = ctx.saved_tensors
        (dout,), call, peers, stages = douts, ctx.call, ctx.peers, ctx.stages
        dquery, dkey, dvalue = map(Gradient, (query, key, value))
        visits = _visits(key, value, call, peers, stages, backward_tiles(query, call))
        work, own = next(visits)
        attend_backward(dout, query, _ordered(own), out, lse, work, call, into=(dquery, dkey, dvalue))
        returning = None
        for index, (work, visitors) in enumerate(visits):
            grads = Gradient(visitors[0]), Gradient(visitors[1])
            attend_backward(dout, query, _ordered(visitors), out, lse, work, call, into=(dquery, *grads))
            if returning is not None:
                _add(returning.wait(), stages[index - 1], dkey, dvalue, call, peers)
            returning = _return_gradients(grads[0].total(), grads[1].total(), call, peers, stages[index])
        if returning is not None:
            _add(returning.wait(), stages[-1], dkey, dvalue, call, peers)
        doffset = softmax_offset_grad(offset, out, dout, lse, call.real_rows(peers.rank))
        return dquery.finish(), dkey.finish(), dvalue.finish(), doffset, None, None, None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor | None,
    call: AttentionCall,
    peers: Peers,
    stages: list[Stage],
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp."""
    result = OutputAccumulator(query, value.shape[-1])
    for work, visitors in _visits(key, value, call, peers, stages, forward_tiles(query, call)):
        attend(query, _ordered(visitors), work, call, into=result)
    out, lse = result.finish(offset)
    call.keep(lse)
    return out, lse


def _visits(
    key: Tensor, value: Tensor, call: AttentionCall, peers: Peers, stages: list[Stage], size: TileSize
) -> Iterator[tuple[TilePlan, KeyValue]]:
    """Yield tiles with keys and values: this rank's own, then each stage's.

    The next stage's rows arrive while the caller computes.
    """
    work, visitors = plan(call.layout, peers.rank, peers.rank, call.mask, size), (key, value)
    for stage in stages:
        arriving = _send_keys(key, value, call, peers, stage)
        yield work, visitors
        visitors = arriving.wait()
        work = plan_seen(call.layout, peers.rank, _sources(stage, peers), call.mask, size)
    yield work, visitors


def _send_keys(
    key: Tensor, value: Tensor, call: AttentionCall, peers: Peers, stage: Stage
) -> comm.PendingReceive[KeyValue]:
    """Send rows that the ranks ahead see; receive what this rank sees of those behind."""
    outgoing: list[list[Tensor]] = [[] for _ in range(peers.size)]
    for rank in _targets(stage, peers):
        rows = _rows_seen(call, rank, peers.rank)
        if rows:
            outgoing[rank] = [_take(key, rows), _take(value, rows)]
    counts = {rank: sum(map(_length, _rows_seen(call, peers.rank, rank))) for rank in _sources(stage, peers)}
    keys, values = (x.new_empty((sum(counts.values()), *x.shape[1:])) for x in (key, value))
    return comm.exchange(outgoing, _by_rank((keys, values), counts, peers), (keys, values), peers, 0)


def _return_gradients(
    dkeys: Tensor, dvalues: Tensor, call: AttentionCall, peers: Peers, stage: Stage
) -> comm.PendingReceive[list[list[Tensor]]]:
    """Return gradients of received rows, and receive those of this rank's rows."""
    counts = {rank: sum(map(_length, _rows_seen(call, peers.rank, rank))) for rank in _sources(stage, peers)}
    dtype = accumulation_dtype(dkeys.dtype)
    incoming: list[list[Tensor]] = [[] for _ in range(peers.size)]
    for rank in _targets(stage, peers):
        rows = sum(map(_length, _rows_seen(call, rank, peers.rank)))
        if rows:
            incoming[rank] = [x.new_empty((rows, *x.shape[1:]), dtype=dtype) for x in (dkeys, dvalues)]
    return comm.exchange(_by_rank((dkeys, dvalues), counts, peers), incoming, incoming, peers, 1)


def _add(
    parts: list[list[Tensor]], stage: Stage, dkey: Gradient, dvalue: Gradient, call: AttentionCall, peers: Peers
) -> None:
    """Add the gradients of this rank's rows that the ranks of ``stage`` computed."""
    for rank in _targets(stage, peers):
        start = 0
        for rows in _rows_seen(call, rank, peers.rank):
            end = start + _length(rows)
            for total, part in zip((dkey, dvalue), parts[rank], strict=True):
                total.add(rows, part[start:end].permute(1, 2, 0, 3))
            start = end


def _rows_seen(call: AttentionCall, q_rank: int, k_rank: int) -> list[slice]:
    return [slice(span.row, span.row + span.length) for span in seen(call.layout, q_rank, k_rank, call.mask)]


def _by_rank(joined: tuple[Tensor, ...], counts: dict[int, int], peers: Peers) -> list[list[Tensor]]:
    """Split joined rows into those of each rank; empty for ranks without rows."""
    pieces = [x.split(list(counts.values())) for x in joined]
    parts: list[list[Tensor]] = [[] for _ in range(peers.size)]
    for index, (rank, count) in enumerate(counts.items()):
        if count:
            parts[rank] = [each[index] for each in pieces]
    return parts


def _take(x: Tensor, rows: list[slice]) -> Tensor:
    return x[rows[0]] if len(rows) == 1 else torch.cat([x[each] for each in rows])


def _ordered(key_value: KeyValue) -> KeyValue:
    """Return keys and values in the memory order that the kernel reads fastest."""
    return by_row((as_read(key_value[0]), as_read(key_value[1])))


def _targets(stage: Stage, peers: Peers) -> tuple[int, ...]:
    return tuple((peers.rank + distance) % peers.size for distance in stage)


def _sources(stage: Stage, peers: Peers) -> tuple[int, ...]:
    return tuple((peers.rank - distance) % peers.size for distance in stage)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)
