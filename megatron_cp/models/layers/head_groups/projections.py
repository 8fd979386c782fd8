"""Projections before and after attention, which is computed by groups of heads.

One autograd function goes from the layer's input to the output of ``linear_proj``, with the norm. So the gradient of
attention's output exists for one group at a time too.

With ``overlap`` the messages of a group, of transports that exchange heads, are on their way while the group before it
is computed, and its results go back while the one after it is. Then tensors of up to three groups exist at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.models.layers.head_groups.groups import Groups, zero_sum


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


class _Unheld(torch.autograd.Function):
    """Tensors with gradients whose values are freed once nothing reads them.

    Autograd keeps the leaves of a graph, and what it is asked for gradients of. It is asked for these at their edges.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensors)

    @staticmethod
    def edges_of(tensors: list[Tensor]) -> tuple[list[Tensor], list[GradientEdge]]:
        with torch.enable_grad():
            unheld = list(_Unheld.apply(torch.zeros((), requires_grad=True), tensors))
        return unheld, [get_gradient_edge(each) for each in unheld]


def _take(parts: Sequence[slice], whole: Tensor) -> Tensor:
    return whole[parts[0]] if len(parts) == 1 else torch.cat([whole[part] for part in parts])


def _add(parts: Sequence[slice], whole: Tensor, gradient: Tensor) -> None:
    """Add to ``parts`` of the gradient of a weight."""
    for part, rows in zip(parts, gradient.split([part.stop - part.start for part in parts]), strict=True):
        whole[part] += rows


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
            attention = groups.attend(
                groups.project(hidden, _take(rows, weight), None if bias is None else _take(rows, bias)), group
            )
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
        start = torch.zeros_like if groups.sharing == 1 else zero_sum
        dweight, dbias = start(weight), None if bias is None else start(bias)
        doutput_weight = torch.empty_like(output_weight)
        sums: list[Tensor | None] = [None] * len(parameters)

        def stages_of(group: int) -> Iterator[None]:
            columns, rows = groups.columns(group, whole.shape[-1]), groups.rows(group, len(weight))
            out = whole[..., columns]
            dout, doutput_weight[:, columns] = groups.output_gradients(doutput, out, output_weight[:, columns])
            out, dout = (x.unflatten(-1, (-1, groups.head_dim)) for x in (out, dout))
            part = _take(rows, weight)
            tensors, edges = _Unheld.edges_of(groups.project(hidden, part, None if bias is None else _take(rows, bias)))
            with torch.enable_grad():
                attention = groups.attend(tensors, group)
            stages = attention.backward(out, denominators[group], dout, (*edges, *parameters), group % 2)
            del out, dout, tensors, attention
            dquery, dkey, dvalue, *others = yield from stages
            del stages
            assert dquery is not None and dkey is not None and dvalue is not None
            of_weight, of_bias = groups.add_gradients((dquery, dkey, dvalue), hidden, part, dnormed)
            _add(rows, dweight, of_weight)
            if dbias is not None:
                _add(rows, dbias, of_bias)
            sums[:] = [b if a is None else a if b is None else a + b for a, b in zip(sums, others, strict=True)]

        groups.run(stages_of)
        dweight, dbias = dweight.to(weight.dtype), None if dbias is None else dbias.to(weight.dtype)
        dhidden, of_norm = groups.norm_gradients(hidden, dnormed)
        return None, dhidden, dweight, dbias, doutput_weight, *of_norm, *sums
