"""Runs on a pretended GPU choose mamba-ssm's kernel in half precision only.

In float32 they never choose it. Not collected directly: ``tests/unit_tests/doubles/test_mamba_on_cpu.py`` runs this
file in a process with a pretended GPU.
"""

from __future__ import annotations

from tests.doubles.mamba_on_cpu.mixers import SMALL, Counted, run_ranks, trained
from tests.doubles.pretend_gpu.steps import BF16, OF_A_STEP, waits_of_a_dense_step
from tests.training_runs import train_losses, worst_difference
from tests.unit_tests.models.hybrids import HYBRID
from tests.unit_tests.training.layouts.cases import CP2


def test_bf16_trains_with_it_as_with_our_scan() -> None:
    ours = run_ranks(trained, 1, BF16, False)[0]
    for losses in run_ranks(trained, 2, BF16 | CP2, True):
        loss, norm = worst_difference(losses, ours)
        assert loss < 2e-3 and norm < 2e-2, (loss, norm)


def not_wanted() -> None:
    counted = Counted()
    train_losses(HYBRID, steps=1)
    assert not counted.calls


def test_float32_trains_without_it() -> None:
    run_ranks(not_wanted, 1)


def waits() -> tuple[dict[str, int], int]:
    counted = Counted()
    return waits_of_a_dense_step(BF16 | CP2 | SMALL), len(counted.calls)


def test_the_host_waits_no_more_often() -> None:
    for found, calls in run_ranks(waits, 2):
        assert calls and found == OF_A_STEP
