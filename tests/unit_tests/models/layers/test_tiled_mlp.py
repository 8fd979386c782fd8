"""MLPs and the last norm in tiles have the same numbers and need less memory.

They recompute no more than without tiles.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp.models.layers.mlp import tiles as in_tiles
from megatron_cp.models.layers.mlp.tiles import compute_in_tiles
from megatron_cp.training.step import train_step
from tests.packed_runs import DYNAMIC, lengths_file, packed_losses
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.models.hybrids import FURTHER, HYBRID, HYBRID_EXPERTS
from tests.unit_tests.models.layers.test_chunked_loss import peak_of_a_step
from tests.unit_tests.training.layouts.cases import CP2, PP2, SP, TP2, VPP2
from tests.unit_tests.training.layouts.test_model_variants import (
    BALANCED,
    BIASED,
    CLASSIC,
    EP2,
    ETP1,
    FULL,
    GPT_OSS,
    LATENT_EXPERTS,
    MIXED_LAYERS,
    OVERLAPPED,
    SHARED,
)

Overrides = dict[str, Any]
TILES = {"model__mlp_chunk_size": 10}  # divides nothing
TWO = {"model__num_layers": 2}
THREE = FULL | {"model__num_layers": 3, "model__recompute_num_layers": 2}
HALF = FULL | {"model__recompute_method": "block", "model__recompute_num_layers": 2}
RECOMPUTED_MLP = {"model__recompute_granularity": "selective", "model__recompute_modules": ["mlp"]}
RECOMPUTED_MOE = RECOMPUTED_MLP | {"model__recompute_modules": ["moe"]}
MTP2 = {"model__mtp_num_layers": 2, "model__mtp_loss_scaling_factor": 0.5}
SANDWICH = {"model__sandwich_norm": True}
STEPS = 3

# The function alone.


def gated(parameters: list[Tensor], rows: Tensor, weights: Tensor) -> Tensor:
    first, bias, second, _ = parameters
    gate, value = (rows @ first + bias).chunk(2, -1)
    return torch.nn.functional.silu(gate) * value @ second * weights[:, None]


def gradients(size: int, dtype: torch.dtype, count: int = 33) -> list[Tensor | None]:
    """Return outputs and gradients of a gated MLP with weights per row, in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes = (count, 8), (count,), (8, 24), (24,), (12, 8), (3,)
    made = [torch.randn(*shape, generator=generator).bfloat16().to(dtype).requires_grad_() for shape in shapes]
    rows, weights, *parameters = made

    def compute(tile: slice, *tensors: Tensor) -> Tensor:
        return gated(parameters, *tensors)

    output = compute_in_tiles(compute, [rows, weights], parameters, size)
    (output * torch.rand(count, 8, generator=generator)).sum().backward()
    return [output.detach(), *(each.grad for each in made)]


@pytest.mark.parametrize("size", [1, 2, 10, 32])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_outputs_and_gradients_equal_those_of_the_whole(size: int, dtype: torch.dtype, tolerance: float) -> None:
    *whole, unused = gradients(33, dtype)
    *tiled, unused_in_tiles = gradients(size, dtype)
    for a, b in zip(whole, tiled, strict=True):
        assert a is not None and b is not None
        assert (a - b).abs().max() <= tolerance * a.abs().max()
    assert unused is unused_in_tiles is None


def test_weight_gradients_are_summed_in_float32() -> None:
    """Over 500 tiles: a sum in bf16 would repeatedly lose values below its last bit."""
    exact = gradients(500, torch.float64, 500)[3]

    def error(size: int) -> float:
        found = gradients(size, torch.bfloat16, 500)[3]
        assert exact is not None and found is not None
        return float((found.double() - exact).norm() / exact.norm())

    assert error(1) < 1.5 * error(500) < 0.02


def test_a_second_derivative_raises() -> None:
    rows, weight = torch.randn(6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    output = compute_in_tiles(lambda tile, each: (each @ weight).square(), [rows], [weight], 2)
    (gradient,) = torch.autograd.grad(output.sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.grad(gradient.square().sum(), rows)


# The memory.


@pytest.mark.parametrize(
    "model", [pytest.param({}, id="dense"), pytest.param(SHARED, id="experts", marks=pytest.mark.slow)]
)
def test_memory_does_not_grow_with_the_intermediates(model: Overrides) -> None:
    """A longer sequence holds six wide tensors, and with tiles less than one."""
    width = 2048
    wide = {
        "model__ffn_hidden_size": width,
        "model__moe_ffn_hidden_size": width if model else None,
        "model__moe_shared_expert_intermediate_size": width if model else None,
        "model__cross_entropy_chunk_size": 64,
    }
    small, large = 256, 512
    for tiles, low, high in (({}, 5.0, 99.0), ({"model__mlp_chunk_size": 64}, 0.0, 1.0)):
        sizes = [run_ranks(peak_of_a_step, 1, length, model | wide | tiles)[0][0] for length in (small, large)]
        grown = (sizes[1] - sizes[0]) / (large - small) / (4 * width)
        assert low < grown < high, (tiles, grown)


# The time.


def first_products(overrides: Overrides) -> dict[str, int]:
    """Return how often a microbatch computes the first product of each layer's MLP."""
    run, batches = start(tiny_config(train__global_batch_size=1, **overrides))
    calls: Counter[str] = Counter()
    names = {module: name.split("layers.")[-1] for name, module in run.model[0].named_modules()}
    for module, name in names.items():
        if name.endswith("linear_fc1"):
            module.register_forward_hook(lambda module, *inputs: calls.update([names[module]]))
    train_step(run, next(batches).microbatches)
    run.close()
    return dict(calls)


@pytest.mark.parametrize(
    ("recompute", "passes"),
    [({}, [2, 2, 2]), (FULL, [2, 2, 2]), (RECOMPUTED_MLP, [2, 2, 2]), (THREE, [3, 2, 2]), (FULL | SANDWICH, [3, 3, 3])],
    ids=["none", "full", "mlp", "pairs of layers", "norms after"],
)
def test_tiles_are_computed_in_the_forward_pass_and_before_their_backward_pass(
    recompute: Overrides, passes: list[int]
) -> None:
    """A recomputed layer whose output nothing reads does not compute its MLP again."""
    calls = run_ranks(first_products, 1, {"model__num_layers": 3} | recompute | TILES)[0]
    tiles = 4  # of a sequence of 32 tokens
    assert calls == {f"{layer}.mlp.linear_fc1": count * tiles for layer, count in enumerate(passes)}


# Training.


def losses_of(overrides: Overrides) -> tuple[list[tuple[float, ...]], list[float]]:
    """Return losses and norms of each step, and how often gradients become ready.

    The latter are all numbers that occur, of a parameter in a microbatch.
    """
    run, batches = start(tiny_config(**overrides))
    ready: Counter[int] = Counter()
    for parameter in (parameter for chunk in run.model for parameter in chunk.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda each: ready.update([id(each)]))
    steps = [next(batches).microbatches for _ in range(STEPS)]
    results = [train_step(run, microbatches) for microbatches in steps]
    run.close()
    times = sorted({number / sum(map(len, steps)) for number in ready.values()})
    losses = [(each.loss, each.grad_norm or 0.0, *each.mtp_losses, *each.router_losses.values()) for each in results]
    return losses, times


CASES: dict[str, tuple[int, Overrides]] = {
    "dense, full recomputation": (1, TWO | FULL),
    "biases and LayerNorm, full recomputation, tp2 sp": (2, CLASSIC | TWO | FULL | TP2 | SP),
    "biases and LayerNorm": (1, CLASSIC),
    "dense, dropout, half of the layers recomputed": (1, HALF | {"model__hidden_dropout": 0.1}),
    "dense, layers recomputed in pairs": (1, THREE),
    "norms after, full recomputation": (1, SANDWICH | FULL),
    "recomputed mlp, tp2": (2, RECOMPUTED_MLP | TP2),
    "mtp, full recomputation, pp2 vpp2 cp2": (4, FULL | PP2 | VPP2 | CP2 | MTP2),
    "tied, larger microbatches, tp2 sp cp2": (
        4,
        TP2 | SP | CP2 | {"train__micro_batch_size": 2, "model__share_embeddings_and_output_weights": True},
    ),
    "shared mtp layer, overlapped, dp2 cp2": (
        4,
        CP2 | MTP2 | {"model__mtp_use_repeated_layer": True} | OVERLAPPED,
    ),
    "hybrid, full recomputation, pp2 tp2 sp": (4, HYBRID | FULL | PP2 | TP2 | SP),
    "hybrid, two tokens further": (1, FURTHER | FULL),
    "shared experts, tp2 sp, full recomputation": (2, SHARED | TWO | FULL | TP2 | SP),
    "experts and an auxiliary loss, ep2 cp2": (4, BALANCED | SHARED | CP2 | EP2),
    "experts, ep2 etp1 tp2 sp": (4, SHARED | BIASED | TP2 | SP | EP2 | ETP1 | FULL),
    "recomputed experts, ep2": (2, MIXED_LAYERS | RECOMPUTED_MOE | EP2),
    "latent experts, full recomputation, ep2": (2, LATENT_EXPERTS | FULL | EP2),
    "experts with biases, full recomputation": (1, GPT_OSS | FULL),
    "hybrid with experts, recomputed, ep2": (2, HYBRID_EXPERTS | RECOMPUTED_MOE | EP2),
}
FAST = ("dense, full recomputation", "biases and LayerNorm, full recomputation, tp2 sp")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES])
def test_training_in_tiles_equals_training_without(name: str) -> None:
    world_size, overrides = CASES[name]
    plain = run_ranks(losses_of, world_size, overrides)[0]
    tiled = run_ranks(losses_of, world_size, overrides | TILES)[0]
    a, b = (torch.tensor(each[0], dtype=torch.float64) for each in (plain, tiled))
    assert ((a - b) / a).abs().max() < 1e-6
    assert plain[1] == tiled[1] == [1.0], "a gradient is ready once a microbatch"


@pytest.mark.slow
def test_dynamic_packs_in_tiles_equal_packs_without(tmp_path: Any) -> None:
    """Ranks of different groups have different numbers of tiles."""
    lengths = lengths_file(tmp_path)
    settings = DYNAMIC | CP2 | SHARED
    plain, tiled = (run_ranks(packed_losses, 4, lengths, settings | more, "cpu", STEPS)[0][0] for more in ({}, TILES))
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (plain, tiled))
    assert ((a - b) / a).abs().max() < 1e-6


def rows_of_the_last_norm(overrides: Overrides) -> list[int]:
    """Train a step; return the rows of each call of the norm after the last layer."""
    rows: list[int] = []
    compute = in_tiles._last_norm

    def counted(forward: Any, *others: Any) -> Tensor:
        return compute(lambda hidden: rows.append(len(hidden)) or forward(hidden), *others)

    in_tiles._last_norm = counted  # this process ends after it
    run, batches = start(tiny_config(**overrides))
    train_step(run, next(batches).microbatches)
    run.close()
    return rows


@pytest.mark.parametrize("model", [{}, HYBRID], ids=["gpt", "hybrid"])
def test_the_last_norm_sees_a_tile_at_a_time(model: Overrides) -> None:
    [rows] = run_ranks(rows_of_the_last_norm, 1, model | TILES)
    assert max(rows) == TILES["model__mlp_chunk_size"]
