"""Output of a run: phases, log line, live line, and metrics.

The metrics are in metrics.jsonl, TensorBoard, and Weights & Biases.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cp.common.jsonl_log import keep_lines_until, read_lines
from megatron_cp.config.run_config import LoggerConfig
from megatron_cp.training.monitor.metrics import Reporter, shows_progress_line
from megatron_cp.training.monitor.phases import PHASES, Interval, Phases, peak_memory_bytes
from megatron_cp.training.monitor.step_metrics import HeldOutLoss, StepMetrics
from megatron_cp.training.monitor.step_report import StepReport, gather_reports, read_reports
from tests.ranks import run_ranks
from tests.training_runs import tiny_config

INTERVAL = Interval({"data": 0.001, "forward_backward": 0.2, "optimizer": 0.0125}, 1_500_000_000)


def step(iteration: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "consumed_tokens": 256 * iteration,
        "consumed_loss_tokens": 200 * iteration,
        "loss_tokens": 200,
        "lm_loss": 5.0,
        "grad_norm": 1.25,
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "step_time_s": 0.25,
        "tokens_per_s": 1024.0,
        "tokens_per_s_per_device": 256.0,
        "tflops_per_device": 0.5,
        "num_microbatches": 2,
        "skipped": False,
    }
    return StepMetrics(**(values | changes))


# Phases.


class Clock:
    """Clock that advances only when set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.skipif(torch.cuda.is_available(), reason="the events here are those that stand in for CUDA's")
@pytest.mark.parametrize("on_gpu", [False, True])  # True: the events' code, on events that keep wall time
def test_phases_add_up_and_inner_ones_are_taken_from_outer_ones(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Clock(monkeypatch)
    phases = Phases(on_gpu)
    with phases("data"):
        work(2)
        with phases("schedule"):
            work(4)
        work(3)
    work(1)
    for _ in range(2):
        with phases("forward_backward"):
            work(10)
    with phases("evaluation"), phases("forward_backward"):
        work(7)
    expected = {"data": 5, "schedule": 4, "other": 1, "forward_backward": 20, "evaluation": 7}
    assert {name: value for name, value in phases.read().items() if value} == pytest.approx(expected)
    work(6)
    assert {name: value for name, value in phases.read().items() if value} == pytest.approx({"other": 6})


def test_a_failed_phase_ends_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Clock(monkeypatch)
    phases = Phases(on_gpu=False)
    with pytest.raises(ValueError, match="inside"), phases("data"), phases("schedule"):
        raise ValueError("inside")
    assert phases.current == "schedule"
    work(5)
    assert {name: value for name, value in phases.read().items() if value} == pytest.approx({"other": 5})
    with phases("optimizer"):
        assert phases.current == "optimizer"
    assert phases.current == "other"


def test_many_events_are_read_before_anybody_asks() -> None:
    phases = Phases(on_gpu=True)
    for _ in range(3000):
        with phases("data"):
            pass
    assert len(phases._borders) <= 1100


def test_phases_cost_next_to_nothing() -> None:
    phases, begin = Phases(), time.process_time()
    for _ in range(2000):
        with phases("data"):
            pass
    assert (time.process_time() - begin) / 2000 < 200e-6  # five of them a step: below a millisecond


class Device:
    """Replace CUDA's events by a device that runs work later, on its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[Any] = []
        self.done = 0
        monkeypatch.setattr(torch.cuda, "Event", self._event)

    def _event(self, enable_timing: bool) -> Any:
        event = types.SimpleNamespace(query=lambda: self.recorded.index(event) < self.done)
        event.record = lambda: self.recorded.append(event)
        event.elapsed_time = lambda end: self._milliseconds_between(event, end)
        return event

    def _milliseconds_between(self, begin: Any, end: Any) -> float:
        assert begin.query() and end.query(), "asked for before it is done"
        return 1e3 * (self.recorded.index(end) - self.recorded.index(begin))


def test_on_a_gpu_phases_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    phases = Phases(on_gpu=True)  # the first event
    with phases("data"):
        pass
    with phases("forward_backward"):
        device.done = 4  # up to the border before the pass forward
        assert phases.read() == {"other": 2, "data": 1}
        assert phases.read() == {}
    device.done = len(device.recorded)
    with phases("optimizer"):
        pass
    assert phases.read() == {"forward_backward": 3}, "in parts, of which readings are borders"
    device.done = len(device.recorded)
    phases.forget()
    device.done = len(device.recorded)
    assert phases.read() == {}
    device.done = len(device.recorded)
    assert phases.read() == {"other": 1}


def interval_of_two_ranks() -> Interval:
    phases, rank = Phases(), torch.distributed.get_rank()
    with phases("data"):
        time.sleep(0.2 * (1 + rank))
    if rank == 1:
        held = torch.ones(30_000_000)  # 120 MB
        assert held.sum() == 30_000_000
    mine = StepReport(
        signal=15 * rank,
        saving=rank == 0,
        peak_memory_bytes=peak_memory_bytes(torch.device("cpu")),
        seconds=dict.fromkeys(PHASES, 0.0) | phases.read(),
    )
    gathered = gather_reports(mine, torch.ones(1, dtype=torch.float64) * (rank == 1), torch.distributed.group.WORLD)
    suspected, report = read_reports(gathered, mine)
    assert suspected and (report.signal, report.out_of_time, report.saving) == (15, False, True)
    return report.interval(5)


def test_an_interval_is_the_mean_of_the_ranks_and_the_memory_of_the_fullest() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    a, b = run_ranks(interval_of_two_ranks, 2)
    assert a == b
    assert 0.3 / 5 <= a.seconds["data"] < 2 * 0.3 / 5
    assert "schedule" not in a.seconds
    assert 100_000_000 < a.peak_memory_bytes < before + 400_000_000


# Sinks.


def report(folder: Path, start: int = 0, steps: range = range(1, 4), step_too: bool = True, **settings: Any) -> None:
    config = tiny_config(**{f"logger__{name}": value for name, value in settings.items()})
    reporter = Reporter(config.logger, 10, folder, start, trains=start < 10, run_settings=config.as_written())
    for iteration in steps if step_too else ():
        reporter.step(step(iteration), INTERVAL if reporter.is_due(iteration) else None)
    reporter.evaluation(steps[-1], "validation", HeldOutLoss(4.5, 100), 0.1)
    reporter.saved(steps[-1], 0.2)
    reporter.close()


def test_lines_and_tensorboard(tmp_path: Path) -> None:
    report(tmp_path, log_interval=2)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2, 3, 3]
    assert "timers_s" not in lines[0] and "imbalance" not in lines[0]
    assert lines[1]["timers_s"] == INTERVAL.seconds and lines[1]["peak_memory_bytes"] == 1_500_000_000
    assert lines[3] == {"iteration": 3, "validation_loss": 4.5, "evaluation_time_s": 0.1}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("lm_loss")] == [1, 2, 3]
    tags = set(board.Tags()["scalars"])
    assert {"timers_s/forward_backward", "peak_memory_bytes", "validation_loss", "checkpoint_time_s"} <= tags


def test_evaluations_on_other_settings_are_marked_and_not_plotted(tmp_path: Path) -> None:
    reporter = Reporter(LoggerConfig(), 3, tmp_path, 3, trains=False, unlike={"dataset.random_seed": 7})
    reporter.evaluation(3, "validation", HeldOutLoss(4.5, 100))
    reporter.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert line == {"iteration": 3, "validation_loss": 4.5, "measured_with": {"dataset.random_seed": 7}}
    assert not any(b"validation_loss" in path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())


def test_values_that_are_not_finite_are_null_in_the_lines(tmp_path: Path) -> None:
    reporter = Reporter(LoggerConfig(tensorboard=False), 10, tmp_path)
    reporter.step(step(1, lm_loss=float("nan"), grad_norm=float("inf")))
    reporter.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text)["lm_loss"] is None


def test_resuming_drops_repeated_and_half_written_lines(tmp_path: Path) -> None:
    report(tmp_path, steps=range(1, 7), tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"iteration": 7, "lm_lo')
    report(tmp_path, start=4, steps=range(5, 8), tensorboard=False)
    assert [line["iteration"] for line in read_lines(path) if "lm_loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    keep_lines_until(tmp_path / "none.jsonl", 3)


def test_lines_are_dropped_wherever_they_are(tmp_path: Path) -> None:
    def lines(*iterations: int) -> str:
        return "".join(f'{{"iteration": {number}, "x": [{number}]}}\n' for number in iterations)

    path = tmp_path / "lines.jsonl"
    path.write_text(lines(1, 5, 2, 3, 30) + '{"iteration": 2, "x": [')
    for last in (3, 2, 0):
        keep_lines_until(path, last)
        assert path.read_text() == lines(*range(1, last + 1))


def test_evaluating_an_older_checkpoint_keeps_the_lines(tmp_path: Path) -> None:
    """An evaluation trains nothing that would take the place of dropped lines."""
    report(tmp_path, steps=range(1, 15), tensorboard=False)
    before = (tmp_path / "metrics.jsonl").read_text()
    report(tmp_path, start=10, steps=range(10, 11), step_too=False, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_text().startswith(before)


def test_a_restarted_run_has_one_curve(tmp_path: Path) -> None:
    """The first attempt ended before the first checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (range(1, 7), range(1, 4)):
        report(tmp_path, steps=steps)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("lm_loss")] == [1, 2, 3]
    assert [line["iteration"] for line in read_lines(tmp_path / "metrics.jsonl") if "lm_loss" in line] == [1, 2, 3]


class FakeRun:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.logged, self.finished = arguments, [], False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_weights_and_biases_gets_the_numbers_and_one_run_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in records calls of wandb. The next test checks that wandb accepts them."""
    runs: list[FakeRun] = []
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **arguments: runs.append(FakeRun(arguments)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for start in (0, 3):
        report(
            tmp_path, start, range(start + 1, start + 4), wandb_project="mine", wandb_exp_name="a", tensorboard=False
        )
    first, second = runs
    assert first.arguments["project"] == "mine" and first.arguments["name"] == "a"
    assert first.arguments["config"]["model"]["num_layers"] == 4 and first.arguments["dir"] == str(tmp_path)
    assert first.arguments["id"] == second.arguments["id"] and second.arguments["resume"] == "allow"
    assert [number for number, _ in first.logged] == [1, 2, 3, 3, 3] and first.finished
    assert first.logged[0][1]["lm_loss"] == 5.0 and "timers_s/data" in first.logged[0][1]


def test_a_run_continues_without_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**arguments: Any) -> None:
        raise ConnectionError("no route to host")

    stand_in = types.ModuleType("wandb")
    stand_in.init = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    report(tmp_path, wandb_project="mine", tensorboard=False)
    assert "Weights & Biases is off, training continues: no route to host" in caplog.text
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 4


def test_a_run_continues_if_weights_and_biases_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Run:
        def log(self, *arguments: Any, **named: Any) -> None:
            raise OSError(28, "No space left on device")

    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **arguments: Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    report(tmp_path, wandb_project="mine", tensorboard=False)
    assert caplog.text.count("Weights & Biases is off, training continues: [Errno 28] No space left") == 1
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="the extra megatron-cp[wandb] is not installed")
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    report(tmp_path, wandb_project="mine", tensorboard=False)
    written = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(written) == 1 and b"lm_loss" in written[0].read_bytes()


# The live line.


def on_a_terminal(folder: str) -> None:
    """Run in a forked rank with a terminal of 110 columns as standard error."""
    from megatron_cp.training.monitor import metrics

    leader, follower = pty.openpty()
    os.environ.update(COLUMNS="110", TERM="xterm-256color")
    os.dup2(follower, 2)
    sys.stderr = os.fdopen(2, "w")
    metrics.console.cache_clear()  # a handler of an earlier test in this process has no terminal
    assert metrics.shows_progress_line("auto")
    reporter = Reporter(LoggerConfig(log_interval=1000, tensorboard=False), 10, Path(folder))
    for iteration in range(1, 6):
        time.sleep(0.05)
        reporter.step(step(iteration, lm_loss=6.0 - iteration))
    text, deadline = "", time.monotonic() + 60
    while "5/10" not in text and time.monotonic() < deadline:  # drawn when the machine has the time
        text += os.read(leader, 1 << 16).decode()
    reporter.close()
    assert "5/10" in text and "loss 1.0000" in text and "1,024 tokens/s" in text, text
    assert re.search(r"left 0:\d\d:\d\d", text), text


def test_the_live_line_has_loss_tokens_and_time_left(tmp_path: Path) -> None:
    run_ranks(on_a_terminal, 1, str(tmp_path))


def test_without_a_terminal_the_log_has_the_time_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="megatron_cp"):
        report(tmp_path, progress="auto", tensorboard=False)
    lines = [line for line in caplog.messages if line.startswith("iteration")]
    assert len(lines) == 3 and all("left 0:00:0" in line for line in lines)


@pytest.mark.parametrize(("progress", "expected"), [("plain", 3), ("none", 0)])
def test_without_progress_there_are_no_step_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, progress: str, expected: int
) -> None:
    """Other lines must be logged, and numbers of steps written.

    With and without a terminal.
    """
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with caplog.at_level("INFO", logger="megatron_cp"):
        report(tmp_path, progress=progress, tensorboard=False)
    assert not shows_progress_line(progress)
    assert sum(line.startswith("iteration") for line in caplog.messages) == expected
    assert "validation loss at iteration 3: 4.500000" in caplog.messages
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert len(lines) == 4 and lines[2]["timers_s"] == INTERVAL.seconds
