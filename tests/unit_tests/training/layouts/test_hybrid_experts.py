"""Hybrid models with experts train like one rank under every layout.

They are in float32, with a few iterations and an uneven loss mask.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training_runs import train_losses, worst_difference
from tests.unit_tests.models.hybrids import HYBRID_EXPERTS
from tests.unit_tests.training.checkpoint.test_checkpoint import resume, save_after
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, LAYOUTS, PP2, SP, TP2, VPP2, batch_for
from tests.unit_tests.training.layouts.test_model_variants import (
    BALANCED,
    EP2,
    ETP1,
    FULL,
    GROUPED,
    OVER_THE_BATCH,
)

STEPS = 3
Overrides = dict[str, Any]
DECENTRALIZED = {"dist__use_decentralized_pg": True}
SPREAD = TP2 | SP | ETP1 | EP2  # tensor-parallel ranks hold other experts each, whole ones
PLAIN = {"optimizer__use_distributed_optimizer": False}
LAST = {"model__hybrid_layer_pattern": "M*EE"}  # the first of two stages has no experts
slow = pytest.mark.slow


def selective(module: str) -> Overrides:
    return {"model__recompute_granularity": "selective", "model__recompute_modules": [module]}


@functools.cache
def single_rank(model: str = "{}", steps: int = STEPS) -> list[tuple[float, float]]:
    return run_ranks(train_losses, 1, HYBRID_EXPERTS | json.loads(model), steps)[0]


def check(world_size: int, layout: Overrides, model: Overrides | None = None) -> None:
    model = batch_for(world_size, layout) | (model or {})
    results = run_ranks(train_losses, world_size, HYBRID_EXPERTS | model | layout, STEPS)
    assert all(result == results[0] for result in results), "ranks report different losses"
    worst = worst_difference(results[0], single_rank(json.dumps(model)))
    assert max(worst) < 2e-6, worst


# Name -> ranks, layout.
CASES: dict[str, tuple[int, Overrides]] = {
    "tp2 sp cp2, ep2 of whole experts": (4, SPREAD | CP2),
    "pp2 vpp2 ep2, decentralized": (4, PP2 | VPP2 | EP2 | DECENTRALIZED),
    "cp4 a2a+p2p [2,2] ep2": (4, CP4 | HCP | EP2),
    "stages as marked, ep2": (4, PP2 | EP2 | {"model__hybrid_layer_pattern": "M*E|E"}),
    "cp2 ep2": (2, CP2 | EP2),
    "tp2 sp, split experts": (2, TP2 | SP),
    "tp2 sp, whole experts": (2, TP2 | SP | ETP1),
    "pp2 tp2 sp, whole experts": (4, PP2 | TP2 | SP | ETP1),
    "virtual stages as marked": (2, PP2 | VPP2 | {"model__hybrid_layer_pattern": "M|*|E|E"}),
    "gathered to experts, cp2 ep2": (2, CP2 | EP2 | {"model__moe_token_dispatcher_type": "allgather"}),
    "full recomputation, ep2 cp2": (4, CP2 | EP2 | FULL),
    "full recomputation, tp2 sp": (2, TP2 | SP | FULL),
    "recomputed experts, cp2 ep2": (2, CP2 | EP2 | selective("moe")),
    "recomputed attention, cp2 ep2": (2, CP2 | EP2 | selective("core_attn")),
    "plain optimizer, dp2 cp2 ep2": (4, CP2 | EP2 | PLAIN),
    "overlapped reductions, dp2 cp2 ep2": (
        4,
        CP2 | EP2 | {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True, "ddp__bucket_size": 20000},
    ),
    **LAYOUTS,
}
CASES["tp2 cp2"] = CASES["tp2 sp cp2"]  # experts ask for sequence parallelism
QUICK = list(CASES)[:2]
MODELS: dict[str, tuple[Overrides, int, Overrides]] = {
    "a stage without experts, pp2 ep2": (LAST, 4, PP2 | EP2),
    "balanced by a loss, tp2 sp cp2": (BALANCED, 4, TP2 | SP | CP2),
    "balanced by a loss, pp2 ep2": (BALANCED, 4, PP2 | EP2),
    "balanced over the batch, cp2": (OVER_THE_BATCH, 2, CP2),
    "experts of two groups of four, ep2 cp2": (GROUPED, 4, CP2 | EP2),
    "an MLP beside the experts, pp2 ep2": ({"model__hybrid_layer_pattern": "*EM-"}, 4, PP2 | EP2),
    "recomputed MLP beside the experts, cp2": ({"model__hybrid_layer_pattern": "*EM-"}, 2, CP2 | selective("mlp")),
    "no attention, hcp": ({"model__hybrid_layer_pattern": "MEME"}, 4, CP4 | HCP),
    "experts first, pp2 vpp2": ({"model__hybrid_layer_pattern": "EM*E"}, 2, PP2 | VPP2),
    "tied embeddings, squared relu, pp2 cp2": (
        {
            "model__share_embeddings_and_output_weights": True,
            "model__activation_func": "squared_relu",
            "model__gated_linear_unit": False,
        },
        4,
        PP2 | CP2,
    ),
}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in CASES])
def test_layout_trains_like_one_rank(name: str) -> None:
    world_size, layout = CASES[name]
    marked = {"model__hybrid_layer_pattern": layout.get("model__hybrid_layer_pattern", "ME*E")}
    check(world_size, layout, marked)


@slow
@pytest.mark.parametrize("name", MODELS)
def test_model_trains_like_one_rank(name: str) -> None:
    model, world_size, layout = MODELS[name]
    check(world_size, layout, model)


def test_experts_matter_and_are_each_their_own() -> None:
    """Layers without effect on the loss, or alike, would be equal under any layout."""
    patterns = ("ME*E", "ME*-", "M-*E", "EM*E")
    losses = [single_rank(json.dumps({"model__hybrid_layer_pattern": pattern}), 1)[0][0] for pattern in patterns]
    fewer = {"model__moe_router_topk": 1, "model__moe_shared_expert_intermediate_size": None}
    losses += [single_rank(json.dumps({name: value}), 1)[0][0] for name, value in fewer.items()]
    assert all(abs(a - b) > 1e-4 for i, a in enumerate(losses) for b in losses[:i]), losses


# Name -> ranks and layout before and after.
RESUMED: dict[str, tuple[tuple[int, Overrides], tuple[int, Overrides]]] = {
    "spread to one rank": ((2, EP2 | CP2), (1, {})),
    "a stage without experts to tp": ((4, PP2 | EP2), (2, TP2 | SP | ETP1)),
    "a stage without experts, the same": ((4, PP2 | EP2), (4, PP2 | EP2)),
    "one rank to tp2 sp cp2, spread": ((1, {}), (4, SPREAD | CP2)),
    "split to a stage without experts": ((2, TP2 | SP), (4, PP2 | EP2)),
    "whole to virtual stages, decentralized": ((2, CP2), (4, PP2 | VPP2 | EP2 | DECENTRALIZED)),
    "plain optimizer, spread to whole": ((2, EP2 | PLAIN), (2, CP2 | PLAIN)),
}


@pytest.mark.parametrize("name", [n if n == "spread to one rank" else pytest.param(n, marks=slow) for n in RESUMED])
def test_resuming_under_another_layout(tmp_path: Path, name: str) -> None:
    (before_size, before), (after_size, after) = RESUMED[name]
    run_ranks(save_after, before_size, HYBRID_EXPERTS | LAST | before, str(tmp_path), 2)
    rest = run_ranks(resume, after_size, HYBRID_EXPERTS | LAST | after, str(tmp_path), 2)[0]
    assert max(worst_difference(rest, single_rank(json.dumps(LAST), 4)[2:])) < 2e-6
