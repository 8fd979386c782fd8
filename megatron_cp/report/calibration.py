"""Fit a device of the time model to the step times of finished runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

import yaml

from megatron_cp.common.atomic_files import write_text
from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import load_recipe
from megatron_cp.dynamic_cp.analysis.recorded import read_step
from megatron_cp.estimate.device import Device
from megatron_cp.estimate.fit import SCALARS, Fit, fit_device
from megatron_cp.estimate.time import time_estimate
from megatron_cp.planner.found import Models
from megatron_cp.planner.packed import packed_time
from megatron_cp.planner.request import environment_of
from megatron_cp.report.runs import LoggedRun, number_of, read_runs
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

_WARM_UP = 2  # first iterations of a process: allocate, compile, connect
_MOST_PACKED = 4  # most steps of a packed run that are predicted; each is scheduled again
_WORDS = dict(
    zip(
        SCALARS,
        ("matrix products", "attention", "memory", "host", "links in a node", "links between nodes"),
        strict=True,
    )
)


@dataclass(frozen=True)
class MeasuredRun:
    """A run with measured steps.

    seconds: median step time; for packed samples the mean of the steps in ``batches``.
    batches: lengths of the samples of each step, for packed samples.
    """

    logged: LoggedRun
    case: Case
    seconds: float
    steps: int
    batches: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.logged.name} ({self.logged.layout}, {self.steps} steps)"

    def predict(self, device: Device, gpus_per_node: int) -> float:
        """Estimate the seconds of a step on ``device``."""
        if self.batches:
            models = Models.on(device, gpus_per_node)
            steps = [packed_time(self.case, each, models) for each in self.batches]
            return mean(each.seconds for each in steps)
        job = job_of(self.case)
        assert job is not None  # see measured_run
        return time_estimate(job, device, gpus_per_node).seconds


@dataclass(frozen=True)
class Calibration:
    """A fitted device, and its predictions of the runs.

    before, left_out: predicted over measured seconds of each run, with the given device, and with a device fitted to
    the other runs.
    """

    runs: Sequence[MeasuredRun]
    fit: Fit
    before: Sequence[float]
    left_out: Sequence[float]

    def __str__(self) -> str:
        rows = [
            f"  {run.seconds:9.4g} s  {was:6.2f}  {now:6.2f}  {out:8.2f}  {run}"
            for run, was, now, out in zip(self.runs, self.before, self.fit.ratios, self.left_out, strict=True)
        ]
        errors = [
            f"{100 * mean(abs(each - 1) for each in ratios):.1f}%"
            for ratios in (self.fit.ratios, self.left_out, self.before)
        ]
        speeds = ", ".join(f"{_WORDS[name]} x{speed:.2f}" for name, speed in zip(SCALARS, self.fit.speeds, strict=True))
        return "\n".join(
            [
                "predicted over measured step time: before, fitted, and fitted to the other runs",
                "   measured    before  fitted  left out",
                *rows,
                f"mean error {errors[0]}; of a run left out {errors[1]}; before {errors[2]}",
                f"speeds: {speeds}",
                *([f"the ranks of a node share {cores} processor cores"] if (cores := self.fit.device.cores) else []),
            ]
        )


def calibrate(folders: Sequence[Path], device: Device, gpus_per_node: int | None = None) -> Calibration:
    """Fit ``device`` to the step times of runs.

    Args:
        gpus_per_node: ranks per node of the runs; by default the device's.

    Raises:
        DataError: a folder is no run, or has too few steps.
        ConfigError: a run's configuration is invalid.
    """
    node = gpus_per_node or device.gpus_per_node
    if device.name == "cpu" and not device.cores:
        device = replace(device, cores=len(os.sched_getaffinity(0)))
    runs = [measured_run(each, device, node) for each in read_runs(folders)]

    def fitted(chosen: Sequence[MeasuredRun]) -> Fit:
        return fit_device(
            device, lambda tried: [run.predict(tried, node) for run in chosen], [run.seconds for run in chosen]
        )

    def ratio(run: MeasuredRun, tried: Device) -> float:
        return run.predict(tried, node) / run.seconds

    others = [fitted([other for other in runs if other is not run]).device if len(runs) > 1 else device for run in runs]
    fit = fitted(runs)
    fit = replace(fit, device=replace(fit.device, name=f"{device.name}-calibrated"))
    return Calibration(
        runs,
        fit,
        [ratio(run, device) for run in runs],
        [ratio(run, each) for run, each in zip(runs, others, strict=True)],
    )


def measured_run(logged: LoggedRun, device: Device, gpus_per_node: int) -> MeasuredRun:
    """Return the measured steps of a run.

    Raises:
        DataError: the run has too few steps.
        ConfigError: its configuration is invalid.
    """
    first = logged.steps[0]["iteration"] + _WARM_UP
    measured = [step for step in logged.steps if step["iteration"] >= first and not step.get("skipped")]
    logs = {step["iteration"]: number_of(step.get("step_time_s")) or 0.0 for step in measured}
    times = {iteration: seconds for iteration, seconds in logs.items() if seconds > 0}
    if not times or logged.ranks is None:
        raise DataError(
            f"{logged.folder}: no step after the first {_WARM_UP}, which are slower. Fix: {NAME.train.train_iters}=5"
        )
    config = load_recipe(logged.folder / "config.yaml")
    case = Case(config, logged.ranks, gpus_per_node, environment_of(device, gpus_per_node))
    try:
        job = job_of(case)
    except ValueError as error:
        raise DataError(f"{logged.folder}: config.yaml does not fit the run's {logged.ranks} ranks: {error}") from error
    if job is None:
        raise DataError(f"{logged.folder}: vocabulary size unknown. Fix: {NAME.model.vocab_size}=N in its config.yaml")
    if config.model.sequence_packing_scheduler is None:
        return MeasuredRun(logged, case, median(times.values()), len(times))
    chosen = list(times)[:_MOST_PACKED]
    try:
        batches = tuple(read_step(logged.folder, iteration).lengths for iteration in chosen)
    except ValueError as error:
        raise DataError(str(error)) from error
    return MeasuredRun(logged, case, mean(times[iteration] for iteration in chosen), len(chosen), batches)


def write_device(path: Path, device: Device, comment: str) -> None:
    """Write a device file.

    Raises:
        OSError: writing failed.
    """
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(device).items()}
    write_text(path, lines + yaml.safe_dump(values, sort_keys=False))
