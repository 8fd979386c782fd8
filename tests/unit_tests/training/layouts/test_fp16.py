"""Training in fp16 is close to float32.

The loss scale adapts and is restored.
"""

from pathlib import Path
from typing import Any

import pytest

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.monitor.nonfinite import MAX_SKIPPED_IN_A_ROW
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import save_checkpoint, start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2

FP16 = {
    "mixed_precision__fp32": False,
    "mixed_precision__fp16": True,
    "mixed_precision__initial_loss_scale": 256.0,
    "mixed_precision__hysteresis": 1,
    "ddp__check_for_nan_in_grad": False,
}
Step = tuple[float, bool, float]  # loss, whether it was left out, and the loss scale after it


def train(overrides: dict[str, Any], steps: int = 6, save: str | None = None, load: str | None = None) -> list[Step]:
    run, batches = start(tiny_config(model__num_layers=2, **overrides))
    if load is not None:
        load_checkpoint(run, load, 3)
    results = []
    for _ in range(steps):
        result = train_step(run, next(batches).microbatches)
        results.append((result.loss, result.skipped, float(run.optimizer.get_loss_scale())))
    if save is not None:
        run.progress.iteration = steps
        save_checkpoint(run, save, {})
    run.close()
    return results


SIZES = [pytest.param(1, {}, marks=pytest.mark.slow), (2, CP2)]


@pytest.mark.parametrize(("size", "layout"), SIZES, ids=["one rank", "cp2"])
def test_it_trains_like_float32(size: int, layout: dict[str, Any]) -> None:
    exact = run_ranks(train, 1, {})[0]
    for results in run_ranks(train, size, FP16 | layout):
        for (loss, skipped, scale), (expected, _, _) in zip(results, exact, strict=True):
            # Each of a few dozen operations rounds by up to 2 ** -11, 5e-4; random signs leave a few times that.
            assert loss == pytest.approx(expected, rel=2e-3)
            assert not skipped and scale == 256


@pytest.mark.parametrize(("size", "layout"), SIZES, ids=["one rank", "cp2"])
def test_steps_that_overflow_are_skipped_and_halve_the_scale(size: int, layout: dict[str, Any]) -> None:
    from_above = FP16 | layout | {"mixed_precision__initial_loss_scale": 2.0**20}
    for results in run_ranks(train, size, from_above, 12):
        scale = 2.0**20
        for _, skipped, after in results:
            scale = scale / 2 if skipped else scale
            assert after == scale
        assert results[0][1] and not results[-1][1]


def test_a_constant_scale_does_not_change() -> None:
    constant = FP16 | {"mixed_precision__loss_scale": 2.0**20}
    assert {(skipped, scale) for _, skipped, scale in run_ranks(train, 1, constant, 3)[0]} == {(True, 2.0**20)}


def stuck(overrides: dict[str, Any]) -> tuple[int, str]:
    """Return the number of overflowing steps before the run ends, and its message."""
    run, batches = start(tiny_config(model__num_layers=2, **overrides))
    for step in range(3 * MAX_SKIPPED_IN_A_ROW):
        try:
            assert train_step(run, next(batches).microbatches).skipped
        except RuntimeFault as fault:
            return step + 1, str(fault)
    return step + 1, "no fault"


@pytest.mark.parametrize(
    ("scale", "falling", "setting"),
    [
        ({"loss_scale": 2.0**24}, 0, "mixed_precision.loss_scale"),
        # The step that reaches the lowest scale is the first of those that count.
        ({"initial_loss_scale": 2.0**28, "min_loss_scale": 2.0**24}, 3, "mixed_precision.min_loss_scale"),
    ],
    ids=["constant", "searched"],
)
def test_a_scale_that_cannot_fall_ends_the_run(scale: dict[str, float], falling: int, setting: str) -> None:
    settings = FP16 | CP2 | {f"mixed_precision__{name}": value for name, value in scale.items()}
    ended = run_ranks(stuck, 2, settings)
    assert ended[0] == ended[1]
    steps, text = ended[0]
    assert steps == falling + MAX_SKIPPED_IN_A_ROW
    assert f"gradients overflow at the loss scale {setting}=1.67772e+07, and {MAX_SKIPPED_IN_A_ROW} steps" in text, text
    assert "; first on rank" in text and f"Fix: {setting}=8.38861e+06, or " in text, text


@pytest.mark.parametrize(
    "distributed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["optimizer", "distributed optimizer"]
)
def test_a_resumed_run_restores_its_scale(tmp_path: Path, distributed: bool) -> None:
    """The number of good steps since the last change must be restored, too.

    The scale doubles after some of them.
    """
    overrides = FP16 | CP2 | {"mixed_precision__loss_scale_window": 4}
    overrides |= {"optimizer__use_distributed_optimizer": distributed, "scheduler__lr_warmup_iters": 0}
    through = run_ranks(train, 2, overrides, 6)[0]
    assert [scale for _, _, scale in through] == [256] * 3 + [512] * 3
    run_ranks(train, 2, overrides, 3, str(tmp_path))
    resumed = run_ranks(train, 2, overrides | {"mixed_precision__initial_loss_scale": 2.0}, 3, None, str(tmp_path))[0]
    assert [scale for _, _, scale in resumed] == [512] * 3
