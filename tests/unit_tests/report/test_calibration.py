"""A device fitted to finished runs, and the file it is stored in."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from megatron_cp import cli
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig
from megatron_cp.estimate.device import Device, load_device
from megatron_cp.estimate.fit import scaled
from megatron_cp.estimate.time import time_estimate
from megatron_cp.report.calibration import calibrate
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

RANKS, NODE = 8, 8
SLOW = scaled(load_device("h100"), [0.7, 1.3, 0.8, 1.0, 0.6, 1.0])
BASE = [
    "model.tensor_model_parallel_size=1",
    "model.context_parallel_size=1",
    "model.sequence_parallel=false",
    "train.global_batch_size=32",
    "model.max_position_embeddings=65536",
    "recipe_world_size=8",
]
LAYOUTS = {
    "short": ["dataset.seq_length=8192"],
    "long": ["dataset.seq_length=65536", "model.context_parallel_size=8", "model.cp_comm_type=a2a"],
    "tensor": ["model.tensor_model_parallel_size=8", "model.sequence_parallel=true", "dataset.seq_length=8192"],
    "other": ["model.tensor_model_parallel_size=2", "model.context_parallel_size=4", "dataset.seq_length=32768"],
}


@cache
def config_of(name: str) -> RunConfig:
    return load_recipe("llama3_8b_pretrain_config", [*BASE, *LAYOUTS[name]])


def seconds_on(device: Device, config: RunConfig) -> float:
    job = job_of(Case(config, RANKS, NODE, Environment.of("gpu")))
    assert job is not None
    return time_estimate(job, device, NODE).seconds


def run_folder(root: Path, name: str, device: Device, factor: float = 1.0, steps: int = 5) -> Path:
    """Write a run of one of :data:`LAYOUTS`, as if measured on ``device``.

    Its first two steps are slow.
    """
    config = config_of(name)
    folder = root / name
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.given()))
    seconds = seconds_on(device, config) * factor
    lines = [
        {
            "iteration": i,
            "lm_loss": 5.0,
            "skipped": False,
            "step_time_s": seconds * (9 if i < 3 else 1),
            "tokens_per_s": 8e4,
            "tokens_per_s_per_device": 1e4,
        }
        for i in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_device_of_three_runs_predicts_another_layout(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path, name, SLOW) for name in ("short", "long", "tensor")]
    found = calibrate(runs, load_device("h100"), NODE)
    assert all(abs(each - 1) < 0.01 for each in found.fit.ratios)
    assert max(abs(each - 1) for each in found.before) > 0.15
    expected = seconds_on(SLOW, config_of("other"))
    assert seconds_on(found.fit.device, config_of("other")) == pytest.approx(expected, rel=0.05)
    assert found.fit.device.name == "h100-calibrated"


def test_a_run_that_took_twice_as_long_shows_where_it_is_left_out(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path, name, SLOW, 2.0 if name == "other" else 1.0) for name in LAYOUTS]
    found = calibrate(runs, load_device("h100"), NODE)
    assert found.left_out[-1] == pytest.approx(0.5, abs=0.05)
    assert all(abs(each - 1) < 0.1 for each in found.fit.ratios[:-1])


def test_the_command_stores_a_device_that_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(run_folder(tmp_path, name, SLOW)) for name in ("short", "long", "tensor")]
    assert cli.main(["plan", "--gpu", "h100", "--calibrate", *runs]) == 0
    said = capsys.readouterr().err
    assert "mean error 0." in said and said.endswith("wrote device.yaml; plan with --gpu device.yaml\n")
    assert load_device("device.yaml") == calibrate([Path(run) for run in runs], load_device("h100"), NODE).fit.device
    assert cli.main(["plan", "--gpu", "device.yaml", "--model", "llama32_1b", "--gpus", "4", "--top", "1"]) == 0
    assert "4 h100-calibrated" in capsys.readouterr().out


def test_overrides_may_follow_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [run_folder(tmp_path, name, SLOW).name for name in ("short", "long", "tensor")]
    Path("short").rename("lr=3")
    command = ["plan", "--gpu", "h100", "--model", "llama32_1b", "--gpus", "4", "--top", "1", "--calibrate", "lr=3"]
    assert cli.main([*command, *runs[1:], "model.tensor_model_parallel_size=2"]) == 0
    assert re.search(r"^1: .*\btp 2\b", capsys.readouterr().out, flags=re.MULTILINE)


def test_packed_runs_are_scheduled_again(older_run: Path) -> None:
    lines = [json.loads(line) for line in (older_run / "metrics.jsonl").read_text().splitlines()]
    plans = [json.loads(line) for line in (older_run / "schedules.jsonl").read_text().splitlines()]
    for folder_lines, file in ((lines, "metrics.jsonl"), (plans, "schedules.jsonl")):
        more = [{**folder_lines[-1], "iteration": i} for i in (3, 4)]
        (older_run / file).write_text("".join(json.dumps(line) + "\n" for line in folder_lines + more))
    found = calibrate([older_run], load_device("cpu"))
    assert found.runs[0].batches == (tuple(plans[-1]["lengths"]),) * 2
    assert found.fit.ratios[0] == pytest.approx(1, abs=0.05)
    assert found.fit.device.cores > 0


@pytest.fixture
def older_run(tmp_path: Path) -> Path:
    source = Path(__file__).parents[2] / "older_runs" / "packed"
    for name in ("config.yaml", "metrics.jsonl", "schedules.jsonl"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--calibrate", "nowhere"], "there is no run folder nowhere"),
        (["--calibrate", "short"], "short: no step after the first 2, which are slower. Fix: train.train_iters=5"),
        (["--calibrate", "short", "--device-file", "x.txt"], "Fix: --device-file x.yaml"),
        ([], "--gpus is required. Fix: --gpus 8"),
        (["--calibrate", "long"], "long: config.yaml does not fit the run's 3 ranks: world size 3 is not divisible"),
    ],
)
def test_calibration_errors_name_a_fix(
    argv: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path, "short", SLOW, steps=2)
    run = run_folder(tmp_path, "long", SLOW)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace("80000.0", "30000.0"))
    assert cli.main(["plan", "--gpu", "h100", *argv]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "device.yaml").exists()
