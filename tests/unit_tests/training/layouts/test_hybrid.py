"""Mamba-2 hybrid models train like one rank under every layout.

They are in float32, with a few iterations and an uneven loss mask.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.training.checkpoint.files import stored_tensors
from tests.ranks import run_ranks
from tests.training_runs import train_losses, worst_difference
from tests.unit_tests.models.hybrids import FURTHER, HYBRID
from tests.unit_tests.training.checkpoint.test_checkpoint import resume, save_after
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, LAYOUTS, PP2, SP, TP2, VPP2, batch_for
from tests.unit_tests.training.layouts.test_model_variants import YARN

STEPS = 3
slow = pytest.mark.slow
FULL = {"model__recompute_granularity": "full", "model__recompute_method": "uniform", "model__recompute_num_layers": 1}
TIED = {"model__share_embeddings_and_output_weights": True}
DECENTRALIZED = {"dist__use_decentralized_pg": True}


@functools.cache
def single_rank(model: str = "{}", steps: int = STEPS) -> list[tuple[float, float]]:
    return run_ranks(train_losses, 1, HYBRID | json.loads(model), steps)[0]


def check(world_size: int, layout: dict[str, Any], model: dict[str, Any] | None = None) -> None:
    overrides = HYBRID | (model or {}) | batch_for(world_size, layout) | layout
    results = run_ranks(train_losses, world_size, overrides, STEPS)
    assert all(result == results[0] for result in results), "ranks report different losses"
    worst_loss, worst_norm = worst_difference(results[0], single_rank(json.dumps(model or {})))
    assert worst_loss < 1e-6 and worst_norm < 1e-6, (worst_loss, worst_norm)


QUICK: dict[str, tuple[int, dict[str, Any]]] = {
    "cp4 a2a+p2p [2,2]": (4, CP4 | HCP),
    "tp2 sp cp2": (4, TP2 | SP | CP2),
    "pp2 vpp2 cp2, decentralized": (4, PP2 | VPP2 | CP2 | DECENTRALIZED),
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "tp2 sp": (2, TP2 | SP),
    "pp2": (2, PP2),
    "stages that are not alike": (2, PP2 | {"model__hybrid_layer_pattern": "M*M|-"}),
    "virtual stages as marked": (2, PP2 | VPP2 | {"model__hybrid_layer_pattern": "M|*|M|-"}),
    "full recomputation, cp2": (2, CP2 | FULL),
    "full recomputation, tp2 sp": (2, TP2 | SP | FULL),
    "selective recomputation, cp4 hcp": (4, CP4 | HCP | {"model__recompute_granularity": "selective"}),
    "plain optimizer, dp2 cp2": (4, CP2 | {"optimizer__use_distributed_optimizer": False}),
    "overlapped reductions, dp2 cp2": (
        4,
        CP2 | {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True, "ddp__bucket_size": 20000},
    ),
    **{f"{name}, decentralized": (size, layout | DECENTRALIZED) for name, (size, layout) in LAYOUTS.items()},
    **LAYOUTS,
}
MODELS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "two tokens further, hcp": (FURTHER, 4, CP4 | HCP | DECENTRALIZED),
    "two tokens further, tp2 sp cp2": (FURTHER, 4, TP2 | SP | CP2),
    "two tokens further, tied embeddings, pp2 vpp2 cp2": (FURTHER | TIED, 4, PP2 | VPP2 | CP2 | DECENTRALIZED),
    "two tokens further, by one layer, pp2 cp2": (FURTHER | {"model__mtp_use_repeated_layer": True}, 4, PP2 | CP2),
    "two tokens further, full recomputation by two, pp2 cp2": (
        FURTHER | FULL | {"model__recompute_num_layers": 2},
        4,
        PP2 | CP2,
    ),
    "two tokens further, transports of all kinds": (
        FURTHER | {"model__window_size": [9, 0], "model__window_attn_skip_freq": 2},
        4,
        CP4 | {"model__cp_comm_type": ["p2p", "all_gather", "p2p", "a2a"]},
    ),
    "tied embeddings, pp2 cp2": (TIED, 4, PP2 | CP2),
    "no attention, cp4": ({"model__hybrid_layer_pattern": "M-M-"}, 4, CP4),
    "squared relu, hcp": ({"model__activation_func": "squared_relu", "model__gated_linear_unit": False}, 4, CP4 | HCP),
    "yarn, hcp": (YARN, 4, CP4 | HCP),
    "no positions, hcp": ({"model__position_embedding_type": "none"}, 4, CP4 | HCP),
    "a group a head, cp4": ({"model__mamba_num_groups": 16}, 4, CP4),
    "one group, cp4": ({"model__mamba_num_groups": 1}, 4, CP4),
    "own number of heads, tp2 cp2": ({"model__mamba_num_heads": 12, "model__mamba_num_groups": 4}, 4, TP2 | CP2),
    "longer than a chunk, hcp": ({"dataset__seq_length": 208}, 4, CP4 | HCP),
    "layer norm and biases, tp2 sp cp2": (
        {"model__normalization": "LayerNorm", "model__add_bias_linear": True, "model__gated_linear_unit": False},
        4,
        TP2 | SP | CP2,
    ),
}

QUICK_MODELS = ("two tokens further, tp2 sp cp2", "two tokens further, tied embeddings, pp2 vpp2 cp2")


@pytest.mark.parametrize("name", QUICK)
def test_layout_trains_like_one_rank(name: str) -> None:
    check(*QUICK[name])


@slow
@pytest.mark.parametrize("name", MORE)
def test_any_layout_trains_like_one_rank(name: str) -> None:
    check(*MORE[name])


@pytest.mark.parametrize("name", [name if name in QUICK_MODELS else pytest.param(name, marks=slow) for name in MODELS])
def test_model_trains_like_one_rank(name: str) -> None:
    model, world_size, layout = MODELS[name]
    check(world_size, layout, model)


@slow
def test_bf16_stays_close_to_float32() -> None:
    half = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
    results = run_ranks(train_losses, 4, HYBRID | CP4 | HCP | half, STEPS)[0]
    worst_loss, _ = worst_difference(results, single_rank())
    assert worst_loss < 1e-2, worst_loss


def test_every_kind_of_layer_matters_and_learns() -> None:
    """Layers without effect on the loss would be equal under any layout."""
    losses = {
        pattern: run_ranks(train_losses, 1, HYBRID | {"model__hybrid_layer_pattern": pattern}, 1)[0][0][0]
        for pattern in ("M*M-", "--M-", "M*--", "M*MM")
    }
    values = list(losses.values())
    assert all(abs(a - b) > 1e-3 for i, a in enumerate(values) for b in values[:i]), losses


RESUMED = {
    "cp4 hcp to one": ((4, CP4 | HCP), (1, {})),
    "tp2 to cp2": ((2, TP2), (2, CP2)),
    "one to tp2 sp cp2": ((1, {}), (4, TP2 | SP | CP2)),
    "pp2 vpp2 as marked to tp2": ((2, PP2 | VPP2 | {"model__hybrid_layer_pattern": "M|*|M|-"}), (2, TP2)),
    "dp2 cp2 to pp2 cp2, tied": ((4, CP2 | TIED), (4, PP2 | CP2 | TIED | DECENTRALIZED)),
    "tp2 to pp2 cp2, two tokens further": ((2, TP2 | FURTHER), (4, PP2 | CP2 | FURTHER)),
}


@pytest.mark.parametrize("name", [name if "further" in name else pytest.param(name, marks=slow) for name in RESUMED])
def test_resuming_under_another_layout(tmp_path: Path, name: str) -> None:
    (before_size, before), (after_size, after) = RESUMED[name]
    model = json.dumps(TIED if "tied" in name else FURTHER if "further" in name else {})
    run_ranks(save_after, before_size, HYBRID | before, str(tmp_path), 2)
    rest = run_ranks(resume, after_size, HYBRID | after, str(tmp_path), 2)[0]
    worst_loss, worst_norm = worst_difference(rest, single_rank(model, 4)[2:])
    assert worst_loss < 2e-6 and worst_norm < 2e-6, (worst_loss, worst_norm)


def test_a_checkpoint_has_megatron_cores_names(tmp_path: Path) -> None:
    """megatron-core saves its mixer in several tensors, and fused norms.

    Input projection and convolution are the ones in several tensors.
    """
    run_ranks(save_after, 2, HYBRID | TP2, str(tmp_path), 1)
    shapes = {key: tuple(x.size) for key, x in stored_tensors(tmp_path / "iter_0000001").items()}
    mixer = "decoder.layers.0.mixer."
    assert {key: shape for key, shape in shapes.items() if key.startswith(mixer)} == {
        **{f"{mixer}in_proj.weight.{part}": (size, 64) for part, size in (("z", 128), ("x", 128))},
        **{f"{mixer}in_proj.weight.{part}": (16, 64) for part in ("B", "C", "dt")},
        **{f"{mixer}conv1d.weight.{part}": (size, 1, 4) for part, size in (("x", 128), ("B", 16), ("C", 16))},
        **{f"{mixer}conv1d.bias.{part}": (size,) for part, size in (("x", 128), ("B", 16), ("C", 16))},
        **{f"{mixer}{name}": (16,) for name in ("A_log", "D", "dt_bias")},
        f"{mixer}norm.weight": (128,),
        f"{mixer}in_proj.layer_norm_weight": (64,),
        f"{mixer}out_proj.weight": (64, 128),
    }
    assert "decoder.final_norm.weight" in shapes
