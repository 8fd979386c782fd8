"""The optimizer's settings after resuming with another schedule or other settings."""

from pathlib import Path
from typing import Any

import pytest

from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.step import train_step
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import save_checkpoint, start, tiny_config

PLAIN = {"optimizer__use_distributed_optimizer": False}
SGD = PLAIN | {"optimizer__optimizer": "sgd"}
SAVED = {
    "scheduler__lr_decay_style": "WSD",
    "scheduler__lr_wsd_decay_iters": 18,
    "scheduler__lr_wsd_decay_style": "linear",
    "scheduler__start_weight_decay": 0.1,
    "scheduler__end_weight_decay": 0.2,
    "scheduler__weight_decay_incr_style": "linear",
}
OTHER_SCHEDULE = {
    "optimizer__lr": 3e-3,
    "optimizer__min_lr": 2e-4,
    "train__train_iters": 30,
    "scheduler__lr_decay_style": "WSD",
    "scheduler__lr_wsd_decay_iters": 29,
    "scheduler__lr_wsd_decay_style": "cosine",
    "scheduler__start_weight_decay": 0.0,
    "scheduler__end_weight_decay": 0.4,
    "scheduler__weight_decay_incr_style": "cosine",
}
OVERRIDE = {"scheduler__override_opt_param_scheduler": True}
AS_SAVED = {"scheduler__use_checkpoint_opt_param_scheduler": True}
STEPS = 4


def save(overrides: dict[str, Any], folder: str) -> None:
    run, batches = start(tiny_config(**overrides))
    for _ in range(STEPS):
        train_step(run, next(batches).microbatches)
    run.progress.iteration = STEPS
    save_checkpoint(run, folder, {"train": batches.state_dict()})
    run.close()


def settings(run: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in run.optimizer.param_groups
    ]


def resumed(overrides: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """Return the optimizer's settings before and after another step."""
    run, batches = start(tiny_config(**overrides))
    batches.load_state_dict(load_checkpoint(run, folder, STEPS)["train"])
    found = settings(run)
    train_step(run, next(batches).microbatches)
    found += settings(run)
    run.close()
    return found


def uninterrupted(overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the same settings of a run that follows one schedule from its start."""
    run, batches = start(tiny_config(**overrides))
    found = []
    for step in range(STEPS + 1):
        train_step(run, next(batches).microbatches)
        found += settings(run) if step >= STEPS - 1 else []
    run.close()
    return found


@pytest.mark.parametrize("optimizer", [{}, PLAIN, SGD], ids=["distributed", "plain", "sgd"])
def test_settings_on_resume(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    of_its_own = {"optimizer__sgd_momentum": 0.5} if "optimizer__optimizer" in optimizer else {}
    of_its_own = of_its_own or {"optimizer__adam_beta2": 0.99, "optimizer__adam_eps": 1e-6}
    run_ranks(save, 1, SAVED | optimizer, str(tmp_path))

    with pytest.raises(RanksFailed, match=r"different learning-rate schedule: .*optimizer.lr is 0.003 here"):
        run_ranks(resumed, 1, SAVED | OTHER_SCHEDULE | optimizer, str(tmp_path))
    for followed, way in ((OTHER_SCHEDULE, OVERRIDE), (SAVED, AS_SAVED)):
        found = run_ranks(resumed, 1, OTHER_SCHEDULE | optimizer | of_its_own | way, str(tmp_path))[0]
        assert found == run_ranks(uninterrupted, 1, followed | optimizer | of_its_own)[0], way


def test_another_decay_of_the_last_steps_is_another_schedule(tmp_path: Path) -> None:
    """megatron-core keeps no record of it."""
    run_ranks(save, 1, SAVED, str(tmp_path))
    with pytest.raises(RanksFailed, match=r"schedule: scheduler.lr_wsd_decay_iters is 5 here and 18 in the checkpoint"):
        run_ranks(resumed, 1, SAVED | {"scheduler__lr_wsd_decay_iters": 5}, str(tmp_path))


@pytest.mark.parametrize("momenta", [(0.0, 0.9), (0.9, 0.0)])
def test_an_added_or_removed_momentum_is_reported_before_the_start(
    tmp_path: Path, momenta: tuple[float, float]
) -> None:
    run_ranks(save, 1, SGD | {"optimizer__sgd_momentum": momenta[0]}, str(tmp_path))
    with pytest.raises(
        RanksFailed, match=rf"optimizer.sgd_momentum is {momenta[1]} here and {momenta[0]} in the check"
    ):
        run_ranks(resumed, 1, SGD | {"optimizer__sgd_momentum": momenta[1]}, str(tmp_path))
    # With a fresh optimizer it resumes.
    without = SGD | {"optimizer__sgd_momentum": momenta[1], "checkpoint__load_optim": False}
    run_ranks(resumed, 1, without, str(tmp_path))


def test_a_schedule_of_a_given_length_is_not_the_runs_length(tmp_path: Path) -> None:
    """Only what differs may be named, not a longer run that does not matter."""
    length = {"scheduler__lr_decay_iters": 20}
    run_ranks(save, 1, length, str(tmp_path))
    with pytest.raises(RanksFailed, match=r"schedule: optimizer.lr is 0.003 here and 0.001 in the checkpoint\. Unless"):
        run_ranks(resumed, 1, length | {"optimizer__lr": 3e-3, "train__train_iters": 30}, str(tmp_path))
