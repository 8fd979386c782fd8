"""The same command resumes a run from its latest checkpoint.

It does not matter how the run first started.
"""

import re
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.common.errors import ConfigError
from megatron_cp.common.jsonl_log import read_lines
from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.report.runs import read_runs
from megatron_cp.training.checkpoint.resume import find_resume_point, is_own_checkpoint
from tests.training_runs import tiny_config

SCHEDULE = ["scheduler.lr_decay_iters=10", "scheduler.lr_warmup_iters=1"]


def losses(folder: Path) -> list[float]:
    return [line["lm_loss"] for line in read_lines(folder / "metrics.jsonl") if "lm_loss" in line]


def test_after_it_went_back_to_an_older_checkpoint(cli: Any, tmp_path: Path) -> None:
    cli = partial(cli, "model.context_parallel_size=1", ranks=1)  # each rank of a layout chooses as one does
    run = tmp_path / "run"
    code, text = cli(*SCHEDULE, "train.train_iters=4", "checkpoint.save_interval=1")
    assert code == 0, text
    back = [*SCHEDULE, "train.train_iters=6", "checkpoint.ckpt_step=2", "train.exit_interval=3"]
    code, text = cli(*back)
    assert code == 0 and f"resumed from iteration 2 of {run}" in text and "further" not in text, text
    code, text = cli(*back)
    assert code == 0 and f"resumed from iteration 3 of {run}" in text, text
    assert "checkpoint.ckpt_step=2: this run started there and has newer checkpoints" in text, text
    code, text = cli(*back, "optimizer.clip_grad=0.5")  # an experiment that starts from there
    assert code == 0 and f"resumed from iteration 2 of {run}" in text, text


def test_after_it_began_with_a_fresh_optimizer(cli: Any, tmp_path: Path) -> None:
    cli = partial(cli, "model.context_parallel_size=1", ranks=1)  # each rank of a layout chooses as one does
    run, uninterrupted = tmp_path / "run", tmp_path / "uninterrupted"
    begin = [*SCHEDULE, "checkpoint.load_optim=false", "train.train_iters=4", "checkpoint.save_interval=2"]
    code, text = cli(*begin, f"checkpoint.save={uninterrupted}")
    assert code == 0, text
    for stop in ("train.exit_interval=2", "train.exit_interval=2"):
        code, text = cli(*begin, stop)
        assert code == 0 and "optimizer state not loaded" not in text, text
    assert losses(run) == losses(uninterrupted)
    code, text = cli(*begin, "train.train_iters=5")
    assert code == 0 and "optimizer state not loaded (checkpoint.load_optim=false)" in text, text


def test_after_it_began_with_the_weights_of_another(cli: Any, tmp_path: Path) -> None:
    code, text = cli("train.train_iters=2", f"checkpoint.save={tmp_path}/first")
    assert code == 0, text
    tuned = ["checkpoint.finetune=true", f"checkpoint.load={tmp_path}/first", "train.train_iters=4"]
    code, text = cli(*tuned, "train.exit_interval=3")
    assert code == 0 and f"started with the weights of iteration 2 of {tmp_path}/first" in text, text
    code, text = cli(*tuned, "train.exit_interval=3")
    assert code == 0 and f"resumed from iteration 3 of {tmp_path}/run" in text, text


def test_a_resumed_run_does_not_evaluate_the_start_again(cli: Any, tmp_path: Path) -> None:
    cli = partial(cli, "model.context_parallel_size=1", ranks=1)
    looks = [*SCHEDULE, "validation.eval_iters=1", "validation.eval_on_start=true", "train.train_iters=2"]
    for stop in ("train.exit_interval=1", "train.exit_interval=null"):
        code, text = cli(*looks, stop)
        assert code == 0, text
    assert "resumed from iteration 1" in text
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in lines if "validation_loss" in line] == [0, 2]


@pytest.mark.parametrize("setting", ["load", "pretrained_checkpoint"])
def test_a_folder_near_the_checkpoints_leads_to_them(tmp_path: Path, setting: str) -> None:
    run = tmp_path / "runs" / "b1"
    for iteration in (5, 10):
        (run / f"iter_{iteration:07d}").mkdir(parents=True)
    to_run = f"Fix: checkpoint.{setting}={run}"
    for given, step, message in (
        (run / "iter_0000005", None, f"{to_run} checkpoint.ckpt_step=5"),
        (run / "iter_0000005", 5, f"{to_run} checkpoint.ckpt_step=5"),
        (run / "iter_0000007", None, f"{to_run} checkpoint.ckpt_step=10 (the newest checkpoint of {run})"),
        (run.parent, None, f"{to_run} (run folders in {run.parent}: b1)"),
        (run, 7, "there is no iter_0000007. Fix: checkpoint.ckpt_step=10"),
    ):
        config = tiny_config(**{f"checkpoint__{setting}": str(given), "checkpoint__ckpt_step": step})
        with pytest.raises(ConfigError, match=re.escape(message)):
            find_resume_point(config)


def test_newer_settings_have_their_defaults() -> None:
    """An update of the program must not make a run start again from its start point."""
    config = RunConfig(model=ModelConfig(num_layers=3), env_vars={"A": "1"})
    saved = asdict(config)
    assert is_own_checkpoint(config, {"config": saved})
    del saved["model"]["overlap_p2p_comm"], saved["profiling"]
    saved["model"]["a_setting_that_is_gone"] = saved["a_section_that_is_gone"] = {"x": 1}
    assert is_own_checkpoint(config, {"config": saved})
    for changed in (
        RunConfig(model=ModelConfig(num_layers=3, overlap_p2p_comm=False), env_vars={"A": "1"}),
        RunConfig(model=ModelConfig(num_layers=4), env_vars={"A": "1"}),
        RunConfig(model=ModelConfig(num_layers=3), env_vars={"B": "1"}),
    ):
        assert not is_own_checkpoint(changed, {"config": saved})
    assert not is_own_checkpoint(config, {})


def test_reading_checkpoints_changes_no_file(cli: Any, tmp_path: Path) -> None:
    """The losses must equal those of the run, for any schedule and layout."""
    run = tmp_path / "run"

    def held_out(name: str = "validation_loss") -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for line in read_lines(run / "metrics.jsonl"):
            if name in line:
                found.setdefault(line["iteration"], []).append(line[name])
        return found

    look = ["train.skip_train=true", "validation.eval_iters=2", "dataset.mock_num_samples=64"]
    code, text = cli(*look)
    assert (
        code == 2 and f"checkpoint.load={run}: there is no checkpoint" in text and "skip_train=true evaluates a" in text
    )
    evaluated = ["validation.eval_interval=2", *look[1:]]
    code, text = cli("train.train_iters=4", "checkpoint.save_interval=2", *evaluated)
    assert code == 0, text
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "metrics.jsonl"}
    lines = (run / "metrics.jsonl").read_text()
    code, text = cli(*look)
    assert code == 0 and f"evaluating iteration 4 of {run}" in text, text
    code, text = cli(*look, "checkpoint.ckpt_step=2", "optimizer.lr=0.1", "model.context_parallel_size=1")
    assert code == 0 and f"evaluating iteration 2 of {run}" in text, text
    assert "checkpoint.ckpt_step=2: selected; the newest checkpoint is of iteration 4" in text
    assert (run / "metrics.jsonl").read_text().startswith(lines)
    assert {path: path.read_bytes() for path in before} == before
    losses, tests = held_out(), held_out("test_loss")
    assert losses[4][0] == losses[4][1] and abs(losses[2][0] - losses[2][1]) < 2e-6 * losses[2][0]
    assert tests[4][0] == tests[4][1] and list(tests) == [4, 2]
    # Other data, another run's weights, and a finished run started again are distinguished.
    code, text = cli(*look, "dataset.random_seed=7")
    assert code == 0 and "validation loss at iteration 4, dataset.random_seed=7: " in text, text
    elsewhere = tmp_path / "elsewhere"
    run.rename(elsewhere)
    code, text = cli(*look, f"checkpoint.load={elsewhere}")
    assert code == 0, text
    (line, _) = read_lines(run / "metrics.jsonl")
    assert line["measured_with"] == {"checkpoint.load": str(elsewhere)}
    assert line["validation_loss"] == losses[4][0]
    shutil.rmtree(run)
    elsewhere.rename(run)
    code, text = cli("train.train_iters=4", *look[1:], "dataset.random_seed=8")
    assert code == 0, text
    seeds = [line.get("measured_with", {}).get("dataset.random_seed") for line in read_lines(run / "metrics.jsonl")]
    assert seeds[-4:] == [7, 7, 8, 8] and not any(seeds[:-4])
    assert {path: path.read_bytes() for path in before} == before
    (found,) = read_runs([run])
    assert found.points("validation_loss") == ([2, 4], [losses[2][1], losses[4][1]])
