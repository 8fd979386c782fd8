"""A call of attention in stages, between which messages are on their way.

A caller computes something else meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall, SavedResult
from megatron_cp.attention.transports.all_to_all import Arrival, HeadExchange, Inner, with_heads_exchanged
from megatron_cp.attention.transports.comm import Peers

type Stages[T] = Generator[None, None, T]


@dataclass(eq=False)
class StagedAttention:
    """One call, checked, with [rows, b, heads, d] of its sequences.

    :meth:`attend` computes it with autograd. :meth:`forward` and :meth:`backward` are its passes as generators. Each
    stops twice, while messages are on their way: of tensors that are exchanged for heads, and of results that go back.
    It waits for them when it goes on. Without such messages it does not stop.

    peers: the ranks that exchange sequence for heads. padding: rows after the last sequence.
    """

    inner: Inner
    tensors: list[Tensor]
    softmax_offset: Tensor | None
    call: AttentionCall
    peers: Peers
    padding: int

    def attend(self) -> Tensor:
        """Return the output [rows and padding, b, heads, d]; differentiable."""
        query, key, value = self.tensors
        return self._padded(
            with_heads_exchanged(self.inner, query, key, value, self.softmax_offset, self.call, self.peers)
        )

    def forward(self, turn: int = 0) -> Stages[tuple[Tensor, Tensor | None]]:
        """Return the output, and what :meth:`backward` needs to know of it.

        The tensors are dropped once they are sent. Overlapping calls need different ``turn``.
        """
        saved = SavedResult()
        if self.peers.size == 1:
            return self._padded(self._attend_alone(saved)), saved.lse
        exchange = self._exchange()
        arrival = exchange.start_spread(self.tensors, exchange.shares, turn)
        self.tensors.clear()
        yield
        out = self._attend(exchange, arrival(), saved)
        arrival = exchange.start_collect([out], exchange.shares[:1], turn)
        del out
        yield
        return self._padded(*arrival()), saved.lse

    def backward(
        self, out: Tensor, lse: Tensor | None, dout: Tensor, inputs: Sequence[Tensor], turn: int = 0
    ) -> Stages[list[Tensor | None]]:
        """Return the gradients of ``inputs``, from which the tensors were computed.

        No forward kernel is started. ``out`` and ``lse`` are those of :meth:`forward`, and ``dout`` is the output's
        gradient. The order of sums does not depend on what is computed between the stages.
        """
        out, dout = out[: self.call.layout.rows], dout[: self.call.layout.rows]
        if self.peers.size == 1:
            with torch.enable_grad():
                result = self._attend_alone(SavedResult(lse, out.contiguous()))
            self.tensors.clear()
            return list(torch.autograd.grad(result, inputs, dout, allow_unused=True))
        exchange, arrivals = self._exchange(), list[Arrival]()
        with torch.enable_grad():
            late = _Late.apply(arrivals, *self.tensors)
        of_query, of_kv, _ = shares = exchange.shares
        tensors = [*(x.detach() for x in self.tensors), out, dout]
        self.tensors.clear()
        arrival = exchange.start_spread(tensors, (of_query, of_kv, of_kv, of_query, of_query), turn)
        del tensors, out, dout
        yield
        *exchanged, out, dout = arrival()
        del arrival
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in exchanged]
            result = self._attend(exchange, leaves, SavedResult(lse, out))
        found = torch.autograd.grad(result, (*leaves, *inputs), dout, allow_unused=True)
        del exchanged, out, dout, leaves, result
        arrivals.append(exchange.start_collect(found[:3], shares, turn))
        of_inner = found[3:]
        del found
        yield
        of_tensors = torch.autograd.grad(late, inputs, allow_unused=True)
        return [b if a is None else a if b is None else a + b for a, b in zip(of_inner, of_tensors, strict=True)]

    def _exchange(self) -> HeadExchange:
        query, key, _ = self.tensors
        return HeadExchange.of(query.shape[2], key.shape[2], self.call, self.peers)

    def _attend(self, exchange: HeadExchange, tensors: Sequence[Tensor], saved: SavedResult) -> Tensor:
        query, key, value = tensors
        return exchange.attend(self.inner, query, key, value, self.softmax_offset, replace(self.call, saved=saved))

    def _attend_alone(self, saved: SavedResult) -> Tensor:
        query, key, value = self.tensors
        return self.inner(query, key, value, self.softmax_offset, replace(self.call, saved=saved))

    def _padded(self, out: Tensor) -> Tensor:
        if not self.padding:
            return out
        return torch.cat([out, out.new_zeros((self.padding, *out.shape[1:]))])


class _Late(torch.autograd.Function):
    """A number whose derivatives by ``tensors`` are what arrives, when it is used.

    Autograd then drops each of them as soon as it can; those that a caller passes stay until the end.
    """

    @staticmethod
    def forward(ctx: Any, arrivals: list[Arrival], *tensors: Tensor) -> Tensor:
        ctx.arrivals = arrivals
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *one: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.arrivals.pop()()
