"""The steps of MLPs in tiles (``mlp_chunk_size``). Pure.

A tile's bytes do not depend on the tokens of a rank. So a step in tiles has them beside its weight's gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.memory.local_blocks import residual
from megatron_cp.estimate.memory.tape import EXPERTS, RESIDUAL, Step, cost_of


class Tiles(NamedTuple):
    """Rows of a tile; None: all rows at once.

    dense: of an MLP or shared expert. experts: of a rank's routed experts.
    """

    dense: int | None
    experts: int | None


def tiles_of(model: ModelConfig, tokens: float, load: float, grouped: bool) -> Tiles:
    """Return the tiles of a rank's ``tokens``.

    load: of :class:`Job`. grouped: one call computes all experts of a rank.
    """
    size = model.mlp_chunk_size
    if size is None:
        return Tiles(None, None)
    local = (model.num_moe_experts or 1) // model.expert_model_parallel_size
    of_expert = tokens * _routed(model, load) / (1 if grouped else local)
    return Tiles(size if size < tokens else None, size if size < of_expert else None)


def _routed(model: ModelConfig, load: float) -> float:
    parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return model.moe_router_topk / parts * (model.expert_tensor_parallel_size or 1) * load


def tiled_mlp(model: ModelConfig, b: int, steps: Sequence[Step], rows: int) -> list[Step]:
    """Join the norm and the products of an MLP, which keep their input alone."""
    stream, end = residual(model, b), 1 + max(place for place, step in enumerate(steps) if step.module == "mlp")
    inside, after = list(steps[:end]), steps[end:]
    name = (RESIDUAL, "mlp input")
    inside[0] = replace(inside[0], keeps={key: size for key, size in inside[0].keeps.items() if key != name})
    # Where something follows, the output's gradient is not the residual's.
    return [Step({name: stream}, stream * (2 if after else 1), _tile_bytes(inside, stream, rows, b)), *after]


def tiled_last_norm(model: ModelConfig, b: int, steps: Sequence[Step], rows: int) -> list[Step]:
    """Join the steps of the model's last norm, which keeps its input alone."""
    stream = residual(model, b)
    name = next(key for key in steps[0].keeps if key[1].endswith("input"))
    inside = [replace(steps[0], keeps={key: size for key, size in steps[0].keeps.items() if key != name}), *steps[1:]]
    return [Step({name: stream}, 2 * stream, _tile_bytes(inside, stream, rows, b))]


def tiled_experts(model: ModelConfig, b: int, layers: ModuleType, steps: Sequence[Step], tiles: Tiles) -> list[Step]:
    """Replace the products of shared experts, and of routed ones after the dispatch."""
    found, stream = list(steps), residual(model, b)
    shared, names = model.moe_shared_expert_intermediate_size, [{name for _, name in step.keeps} for step in steps]
    if shared and tiles.dense is not None:
        place = next(place for place, each in enumerate(names) if "shared 1" in each)
        inside = layers.mlp_products(model, b, EXPERTS, shared / model.tensor_model_parallel_size)
        size = _tile_bytes(inside, stream, tiles.dense, b)
        found[place] = replace(
            found[place], keeps={(RESIDUAL, "experts output"): stream}, gradients=stream, weight=size
        )
    if tiles.experts is not None:
        first, last = (next(n for n, each in enumerate(names) if name in each) for name in ("tokens", "activation"))
        alone = copy.copy(model)  # each rank has whole tokens of its experts, of the latent size if there is one
        alone.hidden_size, alone.sequence_parallel = model.moe_latent_size or model.hidden_size, False
        width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
        inside = layers.mlp_products(alone, b, EXPERTS, width / (model.expert_tensor_parallel_size or 1))
        size = _tile_bytes(inside, alone.hidden_size * b, tiles.experts, b)
        out = steps[first].keeps[EXPERTS, "tokens"]
        found[first : last + 1] = [
            replace(steps[first], gradients=2 * out, weight=size, forward=steps[last].forward),
        ]
    return found


def _tile_bytes(inside: Sequence[Step], stream: float, rows: int, b: int) -> float:
    """Return the bytes of a tile, its weights' gradients and their sums.

    stream: bytes a row of the tile's output.
    """
    sums = sum(step.weight for step in inside) * max(1.0, 4 / b)
    waiting, steps = 0.0, []
    for step in reversed(inside):
        waiting += step.weight
        steps.append(replace(step, weight=waiting + sums))
    return max(moment.total(rows) for moment in cost_of(steps[::-1], stream).moments)
