"""MLPs and the last norm in tiles along the sequence, recomputed backward.

What an MLP keeps for the backward pass is several times its input: the products and the activation. Here
they exist for one tile of tokens at a time, and the layer keeps the MLP's input alone. A dense layer's norm is computed
with the tile. The sums of weight gradients are in float32, and autograd receives them once, so gradient hooks and
weights of several uses work as without tiles.

Routers see all tokens, because their losses and their choices are those of whole sequences. The experts are in tiles
after the dispatch: each tile is some of the tokens that a rank has received, so tiles need no message between ranks
with different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_cp.attention.once_differentiable import once_differentiable
from megatron_cp.mcore.private_names import in_backward_pass
from megatron_cp.models.layers.transformer import SeededTransformerLayer

if TYPE_CHECKING:
    from megatron_cp.config.run_config import ModelConfig

# (rows of the tile, tensors of these rows) -> output of these rows
Compute = Callable[..., Tensor]
Forward = Callable[..., Any]


def compute_in_tiles(
    compute: Compute, rows: Sequence[Tensor], parameters: Sequence[Tensor], size: int, only_added: bool = False
) -> Tensor:
    """Compute ``compute(tile, *(each[tile] for each in rows))`` in tiles of rows.

    Args:
        compute: each row of its output depends on this row of the inputs only. May communicate within a group whose
            ranks have equal numbers of rows.
        rows: tensors of equal length. The output has this length, and the dtype and last dimension of the first.
        parameters: all tensors with a gradient that ``compute`` reads besides ``rows``.
        size: rows of a tile. With as many rows as there are, the call is direct, without recomputation.
        only_added: nothing reads the output's values in a recomputed forward pass. There the output is zeros, because
            the backward pass computes the tiles again anyway.
    """
    if size >= len(rows[0]):
        return compute(slice(None), *rows)
    skipped = only_added and torch.is_grad_enabled() and in_backward_pass()
    return _Tiles.apply(compute, size, skipped, len(rows), *rows, *parameters)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, size: int, skipped: bool, count: int, *tensors: Tensor) -> Tensor:
        rows, ctx.parameters = tensors[:count], tensors[count:]
        ctx.save_for_backward(*rows)
        ctx.compute, ctx.size = compute, size
        if skipped:
            return torch.zeros_like(rows[0])
        output = torch.empty_like(rows[0])
        for tile in _tiles(output, size):
            output[tile] = compute(tile, *(each[tile] for each in rows))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, parameters = ctx.saved_tensors, ctx.parameters
        needed = ctx.needs_input_grad[-len(rows) - len(parameters) :]
        found = [torch.empty_like(row) if need else None for row, need in zip(rows, needed, strict=False)]
        sums: list[Tensor | None] = [None] * len(parameters)
        for tile in _tiles(rows[0], ctx.size):
            _backward_of_tile(ctx, tile, gradients[0][tile], found, sums)
        of_weights = [
            None if total is None else total.to(each.dtype) for total, each in zip(sums, parameters, strict=True)
        ]
        return None, None, None, None, *found, *of_weights


def _backward_of_tile(
    ctx: Any, tile: slice, gradient: Tensor, found: list[Tensor | None], sums: list[Tensor | None]
) -> None:
    """Compute a tile again, write its rows' gradients and add its weight gradients.

    A function, so that nothing of the tile outlives it.
    """
    leaves = [
        row[tile].detach().requires_grad_(whole is not None)
        for row, whole in zip(ctx.saved_tensors, found, strict=True)
    ]
    with torch.enable_grad():
        output = ctx.compute(tile, *leaves)
    wholes, inputs = [each for each in found if each is not None], [leaf for leaf in leaves if leaf.requires_grad]
    of_tile = torch.autograd.grad(output, [*inputs, *ctx.parameters], gradient, allow_unused=True)
    for whole, part in zip(wholes, of_tile, strict=False):
        whole[tile] = part
    for place, parameter in enumerate(ctx.parameters):
        sums[place] = _add(sums[place], of_tile[len(inputs) + place], parameter)


def _tiles(rows: Tensor, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size))


def _add(total: Tensor | None, gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Add a tile's weight gradient, at least in float32.

    A product that accumulates in ``main_grad`` returns a placeholder, which the caller returns as it is.
    """
    if gradient is None:
        return total
    if getattr(parameter, "grad_added_to_main_grad", False):
        return gradient
    if total is None:
        return gradient if gradient.dtype.itemsize >= 4 else gradient.float()
    return total.add_(gradient)


# The modules of a model.


def tile_mlps(layers: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module], model: ModelConfig) -> None:
    """Compute all MLPs in tiles of ``model.mlp_chunk_size`` tokens, in place.

    Args:
        layers: in order, those of the stack that ``recompute_granularity=full`` recomputes in segments.
        others: layers that a norm follows in their segment (multi-token prediction).
    """
    whole = model.recompute_granularity == "full"
    segment = model.recompute_num_layers or 1 if model.recompute_method == "uniform" else 1
    for place, layer in enumerate(layers):
        ends = (place + 1) % segment == 0 or place == len(layers) - 1
        _tile_layer(layer, model, only_added=not whole or (ends and not model.sandwich_norm))
    for layer in others:
        _tile_layer(layer, model, only_added=not whole)


def tile_last_norm(decoder: torch.nn.Module, model: ModelConfig) -> None:
    """Compute the norm after the last layer in tiles, if ``decoder`` has it."""
    norm = getattr(decoder, "final_layernorm", None) or getattr(decoder, "final_norm", None)
    if norm is not None:
        parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
        norm.forward = partial(_last_norm, norm.forward, norm, model.mlp_chunk_size or 1, parts)


def _tile_layer(layer: torch.nn.Module, model: ModelConfig, only_added: bool) -> None:
    if not isinstance(layer, SeededTransformerLayer):
        return
    size, mlp = model.mlp_chunk_size or 1, layer.mlp
    parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
    if isinstance(mlp, MoELayer):
        _tile_experts(mlp.experts, size, only_added and model.moe_latent_size is None)
        if (shared := mlp.shared_experts) is not None:
            shared.forward = partial(_shared, shared.forward, shared, size, parts, only_added)
    elif isinstance(mlp, MLP):
        layer.norm_in_mlp = True
        mlp.forward = partial(_dense, mlp.forward, mlp, layer.pre_mlp_layernorm, size, parts, only_added)


def _tile_experts(experts: torch.nn.Module, size: int, only_added: bool) -> None:
    if isinstance(experts, TEGroupedMLP):
        experts.forward = partial(_grouped, experts.forward, experts, size, only_added)
    elif isinstance(experts, SequentialMLP):
        for expert in experts.local_experts:
            expert.forward = partial(_expert, expert.forward, expert, size, only_added)


# Each takes the module's own forward pass and the settings of tiles, then the arguments of that forward pass.


def _dense(
    forward: Forward, mlp: Any, norm: Any, size: int, parts: int, only_added: bool, hidden: Tensor, **unused: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the MLP of the norm of ``hidden`` [s, b, h], and the bias to add."""
    weights = [*_trained(norm), *_trained(mlp)]
    rows = _positions(hidden, size, parts)
    output = compute_in_tiles(lambda tile, each: forward(norm(each))[0], [hidden], weights, rows, only_added)
    # The parameter itself: as an output of the tiles it would be a copy without its gradient.
    return output, mlp.linear_fc2.bias if mlp.config.add_bias_linear else None


def _last_norm(forward: Forward, norm: Any, size: int, parts: int, hidden: Tensor) -> Tensor:
    rows = _positions(hidden, size, parts)
    return compute_in_tiles(lambda tile, each: forward(each), [hidden], _trained(norm), rows)


def _shared(forward: Forward, mlp: Any, size: int, parts: int, only_added: bool, hidden: Tensor) -> Tensor:
    rows = _positions(hidden, size, parts)
    return compute_in_tiles(lambda tile, each: forward(each), [hidden], _trained(mlp), rows, only_added)


def _expert(
    forward: Forward, expert: Any, size: int, only_added: bool, tokens: Tensor, weights: Tensor
) -> tuple[Tensor, None]:
    """Return an expert's outputs, with bias, times the router's ``weights`` [t]."""
    output = compute_in_tiles(
        lambda tile, *rows: forward(*rows)[0], [tokens, weights], _trained(expert), size, only_added
    )
    return output, None


def _grouped(
    forward: Forward, experts: Any, size: int, only_added: bool, tokens: Tensor, counts: Tensor, weights: Tensor
) -> tuple[Tensor, None]:
    """Return outputs of all local experts; ``counts``: consecutive tokens of each."""
    borders = list(pairwise(accumulate(counts.tolist(), initial=0)))

    def compute(tile: slice, *rows: Tensor) -> Tensor:
        start, stop, _ = tile.indices(len(tokens))
        inside = [max(0, min(end, stop) - max(begin, start)) for begin, end in borders]
        return forward(rows[0], counts.new_tensor(inside), rows[1])[0]

    return compute_in_tiles(compute, [tokens, weights], _trained(experts), size, only_added), None


def _positions(hidden: Tensor, size: int, parts: int) -> int:
    """Return the positions of a tile of at most ``size`` tokens; at least one.

    parts: ranks whose tokens the first product gathers.
    """
    return max(1, size // (hidden.shape[1] * parts))


def _trained(module: torch.nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
