"""Projections before and after attention, which is computed by groups of heads.

One autograd function goes from the layer's input to the output of ``linear_proj``, with the norm. So the gradient of
attention's output exists for one group at a time too. Rows of tokens go through norm and projections in pieces: each
group normalizes them again, and the norm's output never exists whole. Under sequence parallelism a piece has tokens of
all tensor-parallel ranks: all of them at once would be larger than a group's queries, keys and values.

With ``overlap`` the messages of a group, of transports that exchange heads, are on their way while the group before it
is computed, and its results go back while the one after it is. Then tensors of up to three groups exist at a time.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cp.attention.heads import GATHERED_TOKENS
from megatron_cp.attention.merge import accumulation_dtype
from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.attention.stages import StagedAttention

# (projection [s, b, queries + keys + values of a group], number of the group) -> its attention
Attend = Callable[[Tensor, int], StagedAttention]


class ProjectionByGroups(ColumnParallelLinear):
    """``linear_qkv`` that projects a group of heads, attends, and goes on to the next.

    A module of its own, as :class:`OutputByGroups`, whose call waits for its weights: the distributed optimizer may
    still gather them. Without ``gradient_accumulation_fusion``, for which megatron-core's layer needs Apex.
    """

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        unfused = copy.copy(config)
        unfused.gradient_accumulation_fusion = False
        super().__init__(*args, config=unfused, **kwargs)

    def forward(self, hidden: Tensor, groups: Groups, output: OutputByGroups) -> tuple[Tensor, Tensor | None]:
        """Map [s, b, h] to the output and bias of ``output``."""
        return output(groups, hidden, self.weight, self.bias)


class OutputByGroups(RowParallelLinear):
    """``linear_proj`` that is called with the projection before attention."""

    def forward(
        self, groups: Groups, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return [s, b, h], and the bias that the caller adds (``skip_bias_add``)."""
        others = *groups.of_norm, *groups.parameters
        return _ByGroups.apply(groups, hidden, weight, bias, self.weight, *others), self.bias


@dataclass(frozen=True, eq=False)
class Groups:
    """What the groups of a call have in common.

    parameters: others that ``attend`` uses. of_norm: those of ``norm``, before the first projection.
    sharing: groups that attend to the same key/value head. Each projects it, and has a part of its query heads.
    sum_gradients: those of the input are parts of a sum over tensor-parallel ranks, which have equal inputs.
    """

    attend: Attend
    parameters: Sequence[Tensor]
    norm: Callable[[Tensor], Tensor]
    of_norm: Sequence[Tensor]
    count: int
    sharing: int
    overlap: bool
    head_dim: int
    tp_group: Any
    sequence_parallel: bool
    sum_gradients: bool

    def run(self, stages_of: Callable[[int], Iterator[None]]) -> None:
        """Run the stages of all groups, each group's in order.

        With overlap the first stage of a group, after which its messages are on their way, comes before the second of
        the group before it, which waits for those of that group and computes; and the third, which waits for the
        results, comes after the second of the next one. Else group after group.
        """
        groups = [stages_of(group) for group in range(self.count)]
        turns: Iterable[Sequence[Iterator[None]]] = ([group] * 3 for group in groups)
        if self.overlap:
            turns = (groups[max(0, turn - 2) : turn + 1][::-1] for turn in range(self.count + 2))
        for stages in itertools.chain.from_iterable(turns):
            next(stages, None)

    def columns(self, group: int, whole: int) -> slice:
        """Return the group's part of ``whole`` columns of attention's output."""
        share = whole // self.count
        return slice(group * share, (group + 1) * share)

    def rows(self, group: int, whole: int) -> list[slice]:
        """Return the group's rows of ``whole`` of the first projection.

        These are queries, keys and values, by key/value head.
        """
        (head, place), size = divmod(group, self.sharing), whole * self.sharing // self.count
        end, keys_and_values = (head + 1) * size, 2 * self.head_dim
        if self.sharing == 1:
            return [slice(end - size, end)]
        queries = (size - keys_and_values) // self.sharing
        start = end - size + place * queries
        return [slice(start, start + queries), slice(end - keys_and_values, end)]

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project a group's queries, keys and values of all tensor-parallel ranks."""
        mixed = hidden.new_empty((self._ranks, *hidden.shape[:2], len(weight)))
        for piece in self._pieces(hidden):
            mixed[:, piece] = self._by_rank(F.linear(self._gather(self.norm(hidden[piece])), weight, bias))
        return mixed.flatten(0, 1)

    def add_gradients(self, dmixed: Tensor, hidden: Tensor, weight: Tensor, dnormed: Tensor) -> Tensor:
        """Add a group's gradient to that of the norm's output, and return the weight's."""
        of_ranks, dweight = self._by_rank(dmixed), _zero_sum(weight)
        for piece in self._pieces(hidden):
            rows, tokens = of_ranks[:, piece].flatten(0, 2), self._gather(self.norm(hidden[piece]))
            dweight += rows.t() @ tokens.flatten(0, 1)
            dnormed[piece] += self._scatter((rows @ weight).view_as(tokens))
        return dweight

    def output(self, whole: Tensor, weight: Tensor) -> Tensor:
        """Project attention's output [s, b, heads * d] of all groups."""
        of_ranks = self._by_rank(whole)
        output = whole.new_empty((*of_ranks.shape[1:3], len(weight)))
        for piece in self._pieces(output):
            output[piece] = self._scatter(F.linear(of_ranks[:, piece].flatten(0, 1), weight))
        return output if self.sequence_parallel else reduce_from_tensor_model_parallel_region(output, self.tp_group)

    def output_gradients(self, doutput: Tensor, part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a group's part of attention's output, and of its weight."""
        of_ranks, dweight = self._by_rank(part), _zero_sum(weight)
        dpart = torch.empty_like(of_ranks, memory_format=torch.contiguous_format)
        for piece in self._pieces(doutput):
            rows = self._gather(doutput[piece])
            dpart[:, piece] = self._by_rank(rows @ weight)
            dweight += rows.flatten(0, 1).t() @ of_ranks[:, piece].flatten(0, 2)
        return dpart.flatten(0, 1), dweight

    def norm_gradients(self, hidden: Tensor, dnormed: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the input, in ``dnormed``, and of the weights."""
        dhidden = reduce_from_tensor_model_parallel_region(dnormed, self.tp_group) if self.sum_gradients else dnormed
        sums = [_zero_sum(each) for each in self.of_norm]
        for piece in self._pieces(hidden):
            rows = hidden[piece].detach().requires_grad_()
            with torch.enable_grad():
                normed = self.norm(rows)
            dhidden[piece], *found = torch.autograd.grad(normed, (rows, *self.of_norm), dhidden[piece])
            for total, each in zip(sums, found, strict=True):
                total += each
        return dhidden, [total.to(each.dtype) for total, each in zip(sums, self.of_norm, strict=True)]

    @property
    def _ranks(self) -> int:
        """Ranks whose tokens a piece has."""
        return self.tp_group.size() if self.sequence_parallel else 1

    def _by_rank(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self._ranks, -1))

    def _pieces(self, hidden: Tensor) -> Iterator[slice]:
        """Yield the positions of this rank that a piece has."""
        length = max(1, GATHERED_TOKENS // (hidden.shape[1] * self._ranks))
        return (slice(start, start + length) for start in range(0, len(hidden), length))

    def _gather(self, piece: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(piece, group=self.tp_group) if self.sequence_parallel else piece

    def _scatter(self, piece: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return piece
        return reduce_scatter_to_sequence_parallel_region(piece, group=self.tp_group)


def _take(parts: Sequence[slice], whole: Tensor) -> Tensor:
    return whole[parts[0]] if len(parts) == 1 else torch.cat([whole[part] for part in parts])


def _add(parts: Sequence[slice], whole: Tensor, gradient: Tensor) -> None:
    """Add to ``parts`` of the gradient of a weight."""
    for part, rows in zip(parts, gradient.split([part.stop - part.start for part in parts]), strict=True):
        whole[part] += rows


def _zero_sum(weight: Tensor) -> Tensor:
    """Return zeros to which a weight's gradients of pieces are added."""
    return torch.zeros(weight.shape, dtype=accumulation_dtype(weight.dtype), device=weight.device)


class _ByGroups(torch.autograd.Function):
    """All groups in one node, so that each parameter gets its gradient once."""

    @staticmethod
    def forward(
        ctx: Any,
        groups: Groups,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output_weight: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        length = hidden.shape[0] * (groups.tp_group.size() if groups.sequence_parallel else 1)
        whole = hidden.new_empty((length, hidden.shape[1], output_weight.shape[1]))
        denominators: list[Tensor | None] = []

        def stages_of(group: int) -> Iterator[None]:
            rows = groups.rows(group, len(weight))
            mixed = groups.project(hidden, _take(rows, weight), None if bias is None else _take(rows, bias))
            attention = groups.attend(mixed, group)
            del mixed
            out, lse = yield from attention.forward(group % 2)
            whole[..., groups.columns(group, whole.shape[-1])] = out.flatten(2)
            denominators.append(lse)

        groups.run(stages_of)
        ctx.save_for_backward(hidden, weight, bias, output_weight, whole, *denominators, *parameters)
        ctx.groups = groups
        return groups.output(whole, output_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        groups, (doutput,) = ctx.groups, gradients
        hidden, weight, bias, output_weight, whole, *rest = ctx.saved_tensors
        denominators, parameters = rest[: groups.count], rest[groups.count + len(groups.of_norm) :]
        dnormed = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        start = torch.zeros_like if groups.sharing == 1 else _zero_sum
        dweight, dbias = start(weight), None if bias is None else start(bias)
        doutput_weight = torch.empty_like(output_weight)
        sums: list[Tensor | None] = [None] * len(parameters)

        def stages_of(group: int) -> Iterator[None]:
            columns, rows = groups.columns(group, whole.shape[-1]), groups.rows(group, len(weight))
            out = whole[..., columns]
            dout, doutput_weight[:, columns] = groups.output_gradients(doutput, out, output_weight[:, columns])
            out, dout = (x.unflatten(-1, (-1, groups.head_dim)) for x in (out, dout))
            mixed = groups.project(
                hidden, _take(rows, weight), None if bias is None else _take(rows, bias)
            ).requires_grad_()
            with torch.enable_grad():
                attention = groups.attend(mixed, group)
            stages = attention.backward(out, denominators[group], dout, (mixed, *parameters), group % 2)
            del out, dout, mixed, attention
            dmixed, *others = yield from stages
            del stages
            assert dmixed is not None
            _add(rows, dweight, groups.add_gradients(dmixed, hidden, _take(rows, weight), dnormed))
            if dbias is not None:
                _add(rows, dbias, dmixed.sum((0, 1)))
            sums[:] = [b if a is None else a if b is None else a + b for a, b in zip(sums, others, strict=True)]

        groups.run(stages_of)
        dweight, dbias = dweight.to(weight.dtype), None if dbias is None else dbias.to(weight.dtype)
        dhidden, of_norm = groups.norm_gradients(hidden, dnormed)
        return None, dhidden, dweight, dbias, doutput_weight, *of_norm, *sums
