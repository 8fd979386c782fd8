"""The order of groups of heads, and their products with pieces of tokens.

Rows of tokens go through norm and projections in pieces: each group normalizes them again, and the norm's output never
exists whole. Under sequence parallelism a piece has tokens of all tensor-parallel ranks: all of them at once would be
larger than a group's queries, keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_cp.attention.heads import GATHERED_TOKENS
from megatron_cp.attention.merge import accumulation_dtype
from megatron_cp.attention.stages import StagedAttention

# (queries, keys and values of a group, each [s, b, heads, d], number of the group) -> its attention
Attend = Callable[[list[Tensor], int], StagedAttention]


@dataclass(frozen=True, eq=False)
class Groups:
    """What the groups of a call have in common.

    parameters: others that ``attend`` uses. of_norm: those of ``norm``, before the first projection.
    sharing: groups that attend to the same key/value head. Each projects it, and has a part of its query heads.
    queries: heads of a group that attend to the same key/value head.
    sum_gradients: those of the input are parts of a sum over tensor-parallel ranks, which have equal inputs.
    """

    attend: Attend
    parameters: Sequence[Tensor]
    norm: Callable[[Tensor], Tensor]
    of_norm: Sequence[Tensor]
    count: int
    sharing: int
    queries: int
    head_dim: int
    overlap: bool
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
        end = (head + 1) * size
        if self.sharing == 1:
            return [slice(end - size, end)]
        queries, *_ = self._widths
        start = end - size + place * queries
        return [slice(start, start + queries), slice(end - 2 * self.head_dim, end)]

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Project a group's queries, keys and values of all tensor-parallel ranks."""
        shape = self._ranks, *hidden.shape[:2], len(weight) // sum(self._widths)
        apart = [hidden.new_empty((*shape, width)) for width in self._widths]
        for piece in self._pieces(hidden):
            rows = self._by_rank(F.linear(self._gather(self.norm(hidden[piece])), weight, bias))
            for whole, part in zip(apart, rows.unflatten(-1, (shape[-1], -1)).split(self._widths, -1), strict=True):
                whole[:, piece] = part
        return [whole.view(-1, shape[2], shape[3] * whole.shape[-1] // self.head_dim, self.head_dim) for whole in apart]

    def add_gradients(
        self, found: Sequence[Tensor], hidden: Tensor, weight: Tensor, dnormed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add to the gradient of the norm's output, and return weight's and bias'.

        ``found``: gradients of queries, keys and values.
        """
        dweight, dbias = zero_sum(weight), zero_sum(weight[:, 0])
        heads = len(weight) // sum(self._widths)
        of_ranks = [self._by_rank(each).unflatten(3, (heads, -1)) for each in found]
        for piece in self._pieces(hidden):
            rows = torch.cat([each[:, piece].flatten(4) for each in of_ranks], -1).flatten(3).flatten(0, 2)
            tokens = self._gather(self.norm(hidden[piece]))
            dweight += rows.t() @ tokens.flatten(0, 1)
            dbias += rows.sum(0)
            dnormed[piece] += self._scatter((rows @ weight).view_as(tokens))
        return dweight, dbias

    def output(self, whole: Tensor, weight: Tensor) -> Tensor:
        """Project attention's output [s, b, heads * d] of all groups."""
        of_ranks = self._by_rank(whole)
        output = whole.new_empty((*of_ranks.shape[1:3], len(weight)))
        for piece in self._pieces(output):
            output[piece] = self._scatter(F.linear(of_ranks[:, piece].flatten(0, 1), weight))
        return output if self.sequence_parallel else reduce_from_tensor_model_parallel_region(output, self.tp_group)

    def output_gradients(self, doutput: Tensor, part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a group's part of attention's output, and of its weight."""
        of_ranks, dweight = self._by_rank(part), zero_sum(weight)
        dpart = torch.empty_like(of_ranks, memory_format=torch.contiguous_format)
        for piece in self._pieces(doutput):
            rows = self._gather(doutput[piece])
            dpart[:, piece] = self._by_rank(rows @ weight)
            dweight += rows.flatten(0, 1).t() @ of_ranks[:, piece].flatten(0, 2)
        return dpart.flatten(0, 1), dweight

    def norm_gradients(self, hidden: Tensor, dnormed: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the input, in ``dnormed``, and of the weights."""
        dhidden = reduce_from_tensor_model_parallel_region(dnormed, self.tp_group) if self.sum_gradients else dnormed
        sums = [zero_sum(each) for each in self.of_norm]
        for piece in self._pieces(hidden):
            rows = hidden[piece].detach().requires_grad_()
            with torch.enable_grad():
                normed = self.norm(rows)
            dhidden[piece], *found = torch.autograd.grad(normed, (rows, *self.of_norm), dhidden[piece])
            for total, each in zip(sums, found, strict=True):
                total += each
        return dhidden, [total.to(each.dtype) for total, each in zip(sums, self.of_norm, strict=True)]

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values of a key/value head."""
        return self.queries * self.head_dim, self.head_dim, self.head_dim

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


def zero_sum(weight: Tensor) -> Tensor:
    """Return zeros to which a weight's gradients of pieces are added."""
    return torch.zeros(weight.shape, dtype=accumulation_dtype(weight.dtype), device=weight.device)
