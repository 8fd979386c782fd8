"""The gradient norm and its step equal megatron-core's optimizer step.

The norm is read with the losses. megatron-core's step is ``optimizer.step()``.
"""

import math
import os
from typing import Any

import pytest
import torch

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.training import step
from megatron_cp.training.setup import Run
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2, PP2, SP, TP2, layers_for
from tests.unit_tests.training.layouts.test_fp16 import FP16
from tests.unit_tests.training.layouts.test_model_variants import EP2, ETP1, MOE, OVERLAPPED

PLAIN = {"optimizer__use_distributed_optimizer": False}
BF16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 cp2": (4, TP2 | CP2),
    "pp2 tied": (2, PP2 | {"model__share_embeddings_and_output_weights": True}),
    "spread experts": (2, MOE | EP2),
    "spread experts, sums of two groups": (2, MOE | EP2 | PLAIN),
    "whole experts, sums of two groups": (2, MOE | TP2 | SP | ETP1 | PLAIN),
    "bf16": (2, BF16),
    "bf16, plain": (2, BF16 | PLAIN),
    "fp16": (2, FP16 | CP2),
    "overlapped": (2, OVERLAPPED),
    "not clipped": (2, {"optimizer__clip_grad": 0.0}),
    "clipped hard": (2, {"optimizer__clip_grad": 1e-3}),
}
Trained = tuple[list[tuple[float, float]], list[torch.Tensor]]


def as_upstream() -> None:
    """Run megatron-core's own step in place of ours; return its norm."""

    def apply(optimizer: Any, norm: float) -> bool:
        success, norms[0], _ = optimizer.step()
        return success

    def result(*values: Any, grad_norm: Any, **more: Any) -> Any:
        return original(*values, grad_norm=float(norms[0]), **more)

    norms, original = [0.0], step.StepResult
    step.measure_gradients = lambda run: torch.zeros(2, dtype=torch.float64).split(1)
    step.unscale_gradients = lambda run: 0.0
    step.apply_gradients, step.StepResult = apply, result  # type: ignore[misc,assignment]


def trained(overrides: dict[str, Any], upstream: bool) -> Trained:
    if upstream:
        as_upstream()
    run, batches = start(tiny_config(**layers_for(overrides) | overrides))
    results = [step.train_step(run, next(batches).microbatches) for _ in range(3)]
    parameters = [parameter.detach().float() for chunk in run.model for parameter in chunk.parameters()]
    return [(each.loss, each.grad_norm or 0.0) for each in results], parameters


# Combinations of features that other cases cover separately.
SLOW = ("spread experts", "bf16, plain", "not clipped")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_a_step_is_megatron_cores_own(name: str) -> None:
    ranks, overrides = CASES[name]
    ours, theirs = (run_ranks(trained, ranks, overrides, upstream) for upstream in (False, True))
    for (results, parameters), (expected, same) in zip(ours, theirs, strict=True):
        assert results == [pytest.approx(each, rel=1e-6) for each in expected] and results[0][1] > 0
        for one, other in zip(parameters, same, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert all(results == ours[0][0] for results, _ in ours)


def changed_gradient(run: Run, rank: int, name: str, value: float) -> None:
    """Fill a parameter's first gradient with one number, on one rank."""
    if int(os.environ["RANK"]) == rank:
        (parameter,) = (p for chunk in run.model for n, p in chunk.module.named_parameters() if n.endswith(name))
        values = iter([value])
        parameter.register_hook(lambda gradient: torch.full_like(gradient, next(values, 0.0)))


def with_large_gradients(overrides: dict[str, Any], factor: float) -> Trained:
    """Train on gradients that are this many times as large."""
    run, batches = start(tiny_config(optimizer__clip_grad=1e-3, **layers_for(overrides) | overrides))
    for parameter in (parameter for chunk in run.model for parameter in chunk.module.parameters()):
        parameter.register_hook(lambda gradient: gradient * factor)
    results = [step.train_step(run, next(batches).microbatches) for _ in range(2)]
    parameters = [parameter.detach().float() for chunk in run.model for parameter in chunk.parameters()]
    return [(each.loss, each.grad_norm or 0.0) for each in results], parameters


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tp2 cp2", marks=pytest.mark.slow),
        "pp2 tied",
        pytest.param("spread experts", marks=pytest.mark.slow),
        "spread experts, sums of two groups",
    ],
)
def test_a_norm_whose_square_overflows_is_exact(name: str) -> None:
    """Clipped gradients must equal those of a run without the factor.

    Squares of 1e20 overflow float32.
    """
    ranks, overrides = CASES[name]
    usual, large = (run_ranks(with_large_gradients, ranks, overrides, factor) for factor in (1.0, 2.0**80))
    for (results, parameters), (expected, same) in zip(large, usual, strict=True):
        for (loss, norm), (usual_loss, usual_norm) in zip(results, expected, strict=True):
            assert loss == pytest.approx(usual_loss, rel=1e-6) and norm == pytest.approx(2.0**80 * usual_norm, rel=1e-6)
        for one, other in zip(parameters, same, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_largest_gradients_have_a_norm() -> None:
    def norm() -> float:
        run, batches = start(tiny_config())
        changed_gradient(run, 0, "decoder.layers.2.mlp.linear_fc2.weight", 3e38)
        result = step.train_step(run, next(batches).microbatches)
        return result.grad_norm * result.tokens  # it is of the mean over them

    assert run_ranks(norm, 1)[0] == pytest.approx(3e38 * math.sqrt(64 * 96), rel=1e-6)


def faults(overrides: dict[str, Any], damage: Any) -> str:
    run, batches = start(tiny_config(**overrides))
    damage(run)
    before = [parameter.detach().clone() for parameter in run.model[0].parameters()]
    try:
        skipped = step.train_step(run, next(batches).microbatches).skipped
    except RuntimeFault as fault:
        assert all(torch.equal(a, b) for a, b in zip(run.model[0].parameters(), before, strict=True))
        return str(fault)
    return "left out" if skipped else "no fault"


def large(run: Run) -> None:
    changed_gradient(run, 0, "decoder.layers.2.mlp.linear_fc2.weight", 1e25)


@pytest.mark.parametrize("overrides", [{}, PLAIN], ids=["distributed optimizer", "plain"])
def test_gradients_that_adam_cannot_square_end_all(overrides: dict[str, Any]) -> None:
    """An infinite second moment would freeze a parameter for ever.

    Such gradients are not clipped.
    """
    unclipped = overrides | {"optimizer__clip_grad": 0.0}
    for text in run_ranks(faults, 2, unclipped, large):
        assert "but the gradient norm is " in text and "e+24: the squared norm overflows" in text, text
        assert "Fix: optimizer.clip_grad=1" in text and "train.on_nonfinite=skip" in text, text
    assert run_ranks(faults, 2, unclipped | {"train__on_nonfinite": "skip"}, large) == ["left out"] * 2
    clipped = overrides | {"optimizer__clip_grad": 1.0}
    assert run_ranks(faults, 2, clipped, large) == ["no fault"] * 2


def in_a_copy(run: Run) -> None:
    """Return gradients that count in the first rank's norm."""
    changed_gradient(run, 1, "decoder.layers.2.input_layernorm.weight", math.inf)


def after_the_reduction(run: Run) -> None:
    """Damage the gradient of one of two ranks that have the same sums."""
    finalize = run.core_config.finalize_model_grads_func

    def finalize_and_damage(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        next(run.model[0].parameters()).main_grad.view(-1)[3] = math.nan

    if os.environ["RANK"] == "1":
        run.core_config.finalize_model_grads_func = finalize_and_damage


@pytest.mark.parametrize(
    ("overrides", "damage"), [(TP2, in_a_copy), (PLAIN, after_the_reduction), ({}, after_the_reduction)],
    ids=["copy", "replica", "share"],
)  # fmt: skip
def test_a_fault_of_one_rank_ends_all(overrides: dict[str, Any], damage: Any) -> None:
    texts = run_ranks(faults, 2, overrides, damage)
    assert all("but gradients are not finite" in text for text in texts), texts


def test_unchecked_gradients_are_applied_as_they_are() -> None:
    unchecked = {"ddp__check_for_nan_in_grad": False}
    assert run_ranks(faults, 2, PLAIN | unchecked, after_the_reduction) == ["no fault"] * 2
