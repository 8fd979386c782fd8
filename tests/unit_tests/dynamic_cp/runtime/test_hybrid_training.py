"""Mamba-2 hybrids on packs, each with its CP size, train like one rank.

Lengths are long-tailed, and masks are uneven.
"""

import functools
from typing import Any

import pytest

from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import worst_difference
from tests.unit_tests.dynamic_cp.runtime.test_training import CASES, RECOMPUTE, Case, Losses, check_case, train
from tests.unit_tests.models.hybrids import HYBRID
from tests.unit_tests.training.layouts.cases import PP2, TP2

QUICK = ["3 ranks", "tp2 sp", "pp2 vpp2"]
HYBRID_CASES: dict[str, Case] = {
    **CASES,
    "full recomputation, pp2 tp2": (8, PP2 | TP2 | RECOMPUTE, 64, {}),
}


@functools.cache
def single_rank() -> Losses:
    return run_ranks(train, 1, HYBRID, 128)[0][0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in HYBRID_CASES]
)
def test_packed_training_equals_one_rank(name: str) -> None:
    check_case(HYBRID_CASES[name], HYBRID, single_rank())


def without_resets() -> Losses:
    from megatron_cp.models.layers.mamba import mixer

    def one_sequence(layout: Any, device: Any) -> Any:
        numbers, padding = original(layout, device)
        return numbers * 0, padding

    original, mixer.sequences_of = mixer.sequences_of, one_sequence
    return train(HYBRID, 128)[0]


def test_a_state_that_is_not_reset_is_detected() -> None:
    worst_loss, _ = worst_difference(run_ranks(without_resets, 1)[0], single_rank())
    assert worst_loss > 1e-4


def without_the_switch() -> None:
    import contextlib

    from megatron_cp.models.layers.mamba import mixer

    mixer.active_group = lambda groups, packed: contextlib.nullcontext()
    train(HYBRID, 32)


def test_mamba_layers_need_the_switch() -> None:
    """Mamba layers would exchange over the configured group otherwise.

    It has one rank here, and another number of tokens.
    """
    with pytest.raises(RanksFailed, match=r"Mamba layer: .* rows do not match the pack, whose sequences have"):
        run_ranks(without_the_switch, 4)
