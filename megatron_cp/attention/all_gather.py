"""``all_gather``: every rank collects all keys and values and attends to them with its own queries.

The gather is one exchange with nothing to wait for in between, and the only transport whose memory grows with the
group: the gathered keys and values, and in the backward pass (which gathers again rather than save them) their
gradients, which are then summed over ranks and scattered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention import comm
from megatron_cp.attention.comm import Peers
from megatron_cp.attention.context import Problem
from megatron_cp.attention.kernels import attend, attend_backward, backward_tiles, forward_tiles
from megatron_cp.attention.merge import Gradient, OutputAccumulator, softmax_offset_grad
from megatron_cp.attention.sharding import regroup_order
from megatron_cp.attention.tiles import plan_gathered


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax_offset: Tensor | None, problem: Problem, peers: Peers
) -> Tensor:
    """Attention of this rank's queries over all ranks' keys and values, [s_local, b, h, d]; differentiable."""
    return _AllGather.apply(query, key, value, softmax_offset, problem, peers)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, offset: Tensor | None, problem: Problem, peers: Peers
    ) -> Tensor:
        arriving = _start_gather(key, value, peers)
        result = OutputAccumulator(query, value.shape[-1])
        tiles = plan_gathered(problem.layout, peers.rank, problem.mask, forward_tiles(query))
        attend(query, _in_order(arriving, problem, peers), tiles, problem.scale, into=result)
        out, lse = result.finish(offset)
        ctx.save_for_backward(query, key, value, out, lse, offset)
        ctx.problem, ctx.peers = problem, peers
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, offset = ctx.saved_tensors
        (dout,), problem, peers = douts, ctx.problem, ctx.peers
        keys, values = _in_order(_start_gather(key, value, peers), problem, peers)
        dquery, dkeys, dvalues = Gradient(query), Gradient(keys), Gradient(values)
        tiles = plan_gathered(problem.layout, peers.rank, problem.mask, backward_tiles(query, problem))
        attend_backward(dout, query, (keys, values), out, lse, tiles, problem.scale, into=(dquery, dkeys, dvalues))
        dkey, dvalue = (_scatter(x.total(), problem, peers) for x in (dkeys, dvalues))
        doffset = softmax_offset_grad(offset, out, dout, lse, problem.real_rows(peers.rank))
        return dquery.finish(), dkey.to(key.dtype), dvalue.to(value.dtype), doffset, None, None


def _start_gather(key: Tensor, value: Tensor, peers: Peers) -> tuple[comm.Arrival[Tensor], comm.Arrival[Tensor]]:
    return comm.all_gather(key, peers), comm.all_gather(value, peers)


def _in_order(
    arriving: tuple[comm.Arrival[Tensor], comm.Arrival[Tensor]], problem: Problem, peers: Peers
) -> tuple[Tensor, Tensor]:
    """The gathered shards, put into the order of their sequences."""
    order = regroup_order(problem.layout, peers.size)
    keys, values = arriving
    return comm.permute_rows(keys.wait(), order), comm.permute_rows(values.wait(), order)


def _scatter(gradient: Tensor, problem: Problem, peers: Peers) -> Tensor:
    """The sum over ranks of this rank's rows of ``gradient``, whose rows are in sequence order."""
    order = regroup_order(problem.layout, peers.size)
    shards = comm.permute_rows(gradient, order, inverse=True)
    return comm.reduce_scatter(shards.unflatten(0, (peers.size, -1)), peers)
