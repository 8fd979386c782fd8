"""Every layout trains the same model as one rank.

It is in float32, with an uneven loss mask, and 20 iterations where time allows.
"""

import functools
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config, train_losses, worst_difference
from tests.unit_tests.models.hybrids import HYBRID_EXPERTS
from tests.unit_tests.training.layouts.cases import LAYOUTS, PP2, SIX_LAYERS, VPP2, batch_for, layers_for
from tests.unit_tests.training.layouts.test_model_variants import CLASSIC, MOE

STEPS, FEW, MORE = 3, 6, 20
# float32 sums in another order differ by about 1e-7; 20 Adam steps with a changing loss come to 4e-7.
TOLERANCE = 2e-6


steps = pytest.mark.parametrize("steps", [STEPS, pytest.param(MORE, marks=pytest.mark.slow)])


@functools.cache
def single_rank(layers: int = 2, steps: int = MORE) -> list[tuple[float, float]]:
    return run_ranks(train_losses, 1, {"model__num_layers": layers}, steps)[0]


@functools.cache
def of_layout(name: str, decentralized: bool, steps: int) -> list[tuple[float, float]]:
    world_size, overrides = LAYOUTS[name]
    overrides = layers_for(overrides) | batch_for(world_size, overrides) | overrides
    results = run_ranks(train_losses, world_size, overrides | {"dist__use_decentralized_pg": decentralized}, steps)
    assert all(result == results[0] for result in results), "ranks report different losses"
    return results[0]


# Transports on two ranks that cases on four ranks cover too, and layouts that test_model_variants trains.
SLOW = ("cp2 all_gather", "cp2 a2a", "tp2 cp2", "pp2 cp2")


@steps
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_layout_trains_like_one_rank(name: str, steps: int) -> None:
    layers = layers_for(LAYOUTS[name][1]).get("model__num_layers", 4)
    worst_loss, worst_norm = worst_difference(of_layout(name, False, steps), single_rank(layers, steps))
    assert worst_loss < TOLERANCE and worst_norm < TOLERANCE, (worst_loss, worst_norm)


def test_stages_that_wait_for_their_messages_train_bit_for_bit_like_those_that_do_not() -> None:
    name = "pp2 vpp2 cp2"
    ranks, overrides = LAYOUTS[name]
    waiting = run_ranks(train_losses, ranks, overrides | {"model__overlap_p2p_comm": False}, STEPS)
    assert waiting[0] == of_layout(name, False, STEPS)


PP = "model__pipeline_model_parallel_size"
FIRST, LAST = "model__num_layers_in_first_pipeline_stage", "model__num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    [
        ({}, 2, PP2 | {FIRST: 1}),
        (SIX_LAYERS, 2, PP2 | VPP2 | {FIRST: 2}),
        ({"model__num_layers": 5}, 3, {PP: 3, FIRST: 1, LAST: 1}),
    ],
    ids=["1 and 3", "2 and 4, interleaved", "1, 3 and 1"],
)
def test_stages_of_unevenly_many_layers_train_like_one_rank(
    model: dict[str, Any], ranks: int, layout: dict[str, Any]
) -> None:
    reference = run_ranks(train_losses, 1, model, STEPS)[0]
    results = run_ranks(train_losses, ranks, model | layout, STEPS)
    assert all(result == results[0] for result in results), "ranks report different losses"
    assert max(worst_difference(results[0], reference)) < TOLERANCE


# One of each kind of group; the others are slow.
FAST = ("cp4 a2a+p2p [2,2]", "tp2 sp cp2", "pp2 vpp2 cp2", "dp2 cp2")


@steps
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_decentralized_groups_train_bit_for_bit_like_the_mpu(name: str, steps: int) -> None:
    assert of_layout(name, True, steps) == of_layout(name, False, steps)


def test_the_model_learns_and_the_mask_matters() -> None:
    """The comparisons above would pass with a frozen model or an unused mask."""
    losses = [loss for loss, _ in single_rank(steps=FEW)]
    frozen = run_ranks(train_losses, 1, layers_for() | {"optimizer__lr": 1e-12, "optimizer__min_lr": 0.0}, FEW)[0]
    assert frozen[0][0] == losses[0] and abs(frozen[-1][0] - losses[-1]) > 1e-2
    unmasked = run_ranks(train_losses, 1, layers_for() | {"dataset__mock_masked_fraction": 0.0}, 1)[0]
    assert abs(unmasked[0][0] - losses[0]) > 1e-3


def first_weights(overrides: dict[str, Any], seed: int = 7) -> dict[str, list[float]]:
    run, _ = start(tiny_config(**overrides, rng__seed=seed))
    found = {name: weight.flatten()[:8].tolist() for name, weight in run.model[0].named_parameters()}
    run.close()
    return found


@pytest.mark.parametrize(
    "model", [MOE | {"model__mtp_num_layers": 1}, HYBRID_EXPERTS], ids=["experts and mtp", "hybrid"]
)
def test_another_seed_is_another_model(model: dict[str, Any]) -> None:
    """Every initialized weight must differ.

    PyTorch's CPU generator ignores a seed's bits beyond 32.
    """
    one, same, other = (run_ranks(first_weights, 1, model, seed)[0] for seed in (7, 7, 8))
    assert one == same
    drawn = [name for name, values in one.items() if len(set(values)) > 1]
    assert len(drawn) >= 10
    assert [name for name in drawn if one[name] == other[name]] == []


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_replicas_start_with_the_weights_of_the_first(distributed: bool) -> None:
    drawn = CLASSIC | {"rng__data_parallel_random_init": True, "optimizer__use_distributed_optimizer": distributed}
    one = run_ranks(first_weights, 1, CLASSIC)[0]
    assert run_ranks(first_weights, 2, drawn) == [one, one]
