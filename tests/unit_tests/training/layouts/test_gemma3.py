"""Gemma 3 trains like one rank under every layout.

It is in float32, with a few iterations and an uneven loss mask.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training_runs import Losses, train_losses, worst_difference
from tests.unit_tests.models.gemma3 import GEMMA3
from tests.unit_tests.models.hybrids import FURTHER
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, LAYOUTS, PP2, SP, TP2, VPP2
from tests.unit_tests.training.layouts.test_model_variants import EP2, ETP1, FULL, HEAD_GROUPS, MLA, SHARED

Overrides = dict[str, Any]
STEPS = 3
MTP = {"model__mtp_num_layers": 2}
LAYER_NORM = {"model__normalization": "LayerNorm", "model__add_bias_linear": True}
# Latent attention has positions and a scale of its own.
OWN_POSITIONS = ("rotary_base_local", "seq_len_interpolation_factor", "softmax_scale", "kv_channels")
LATENT = MLA | {f"model__{name}": None for name in OWN_POSITIONS}
MODELS: dict[str, tuple[Overrides, int, Overrides]] = {
    **{name: ({}, size, layout) for name, (size, layout) in LAYOUTS.items()},
    "tp2": ({}, 2, TP2),
    "pp2 vpp2": ({}, 2, PP2 | VPP2),
    "tp2 cp2, decentralized": ({}, 4, TP2 | CP2 | {"dist__use_decentralized_pg": True}),
    "full recomputation, cp2": ({}, 2, CP2 | FULL),
    "groups of heads, tp2 sp cp2": ({}, 4, TP2 | SP | CP2 | HEAD_GROUPS),
    "groups of heads, hybrid, two tokens further, tp2 sp cp2": (
        FURTHER | {"model__sandwich_norm": False},
        4,
        TP2 | SP | CP2 | HEAD_GROUPS,
    ),
    "two tokens further, pp2 cp2": (MTP, 4, PP2 | CP2),
    "two tokens further, tp2 sp cp2": (MTP, 4, TP2 | SP | CP2),
    "experts, ep2 cp2": (SHARED, 4, EP2 | CP2),
    "experts, tp2 sp": (SHARED, 2, TP2 | SP | ETP1),
    "LayerNorm and biases, tp2 sp": (LAYER_NORM, 2, TP2 | SP),
    "latent attention, hcp": (LATENT, 4, CP4 | HCP),
    "hybrid, two tokens further, tp2 sp cp2": (FURTHER | {"model__sandwich_norm": False}, 4, TP2 | SP | CP2),
}
FAST = ("cp4 p2p", "cp4 a2a+p2p [2,2]", "tp2 sp cp2", "pp2 vpp2")


@functools.cache
def single_rank(model: str) -> Losses:
    return run_ranks(train_losses, 1, GEMMA3 | json.loads(model), STEPS)[0]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_gemma_trains_like_one_rank(name: str) -> None:
    model, size, layout = MODELS[name]
    results = run_ranks(train_losses, size, GEMMA3 | model | layout, STEPS)
    assert all(losses == results[0] for losses in results), "ranks report different losses"
    # Both sides compute in float32 and sum in another order: 2e-7 as measured.
    worst = worst_difference(results[0], single_rank(json.dumps(model)))
    assert max(worst) < 1e-6, worst
