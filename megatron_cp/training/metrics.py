"""What a run tells while it runs: log lines, a live progress line, and the sinks' numbers. Rank 0 alone writes."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_cp.config import RunConfig
from megatron_cp.dynamic_cp.iterator import StepPlan
from megatron_cp.dynamic_cp.recorded import record
from megatron_cp.parallel.layout import layout_of
from megatron_cp.run_lines import METRICS, SCHEDULES
from megatron_cp.terminal import PrintableRecords
from megatron_cp.training.phases import Interval
from megatron_cp.training.scheduling import what_keeps_step
from megatron_cp.training.sinks import JsonLines, open_charts, writing_into

logger = logging.getLogger("megatron_cp")

_STEPS_TO_JUDGE_BY = 100  # the time left follows from the pace of these


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``. Times in seconds, rates a second over the whole world unless named otherwise.

    ``step_time_s`` is the step alone, without evaluation and checkpoints between steps. The fields that are ``None``
    by default are those of packed microbatches and are left out without them; ``cp_sizes`` counts groups by CP size.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
    grad_norm: float | None
    learning_rate: float
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    num_microbatches: int
    skipped: bool
    loss_scale: float = 1.0
    mtp_losses: tuple[float, ...] = ()  # of each depth of multi-token prediction; written as "mtp_1 loss" and so on
    router_losses: dict[str, float] = field(default_factory=dict)  # of experts, by name, without their weights
    loss_spike: bool = False  # far above the usual loss
    schedule_time_s: float | None = None
    imbalance: float | None = None
    padding_fraction: float | None = None
    cp_sizes: dict[int, int] | None = None


_OPTIONAL = {each.name for each in fields(StepMetrics) if each.default is None}


def wants_live_line(config: RunConfig) -> bool:
    """Whether rank 0 draws a moving progress line: asked for, or "auto" on a terminal."""
    choice = config.logger.progress
    return choice == "rich" or (choice == "auto" and sys.stderr.isatty())


class Reporter:
    """What a run tells while it runs. This one writes nothing: it is that of every rank but the first.

    writes: whether anybody reads what it is told; what takes work to find out need not be told otherwise.
    """

    writes = False

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._total = config.train.train_iters

    def is_due(self, iteration: int) -> bool:
        """Whether this iteration is logged; the same on every rank."""
        return iteration % self._config.logger.log_interval == 0 or iteration == self._total

    def step(self, metrics: StepMetrics, interval: Interval | None = None) -> None:
        """Record one optimizer step, and what was measured over the last interval where one ends here."""

    def schedule(self, iteration: int, plan: StepPlan) -> None:
        """Record what a step of packed microbatches ran, in ``schedules.jsonl``."""

    def evaluation(self, iteration: int, name: str, loss: float, seconds: float | None = None) -> None:
        """Record the loss on held-out data, and how long it took."""

    def saved(self, iteration: int, seconds: float) -> None:
        """Show for how long training stood still to save a checkpoint; ``metrics.jsonl`` has it among the phases."""

    def close(self) -> None:
        """Write no more."""


class WritingReporter(Reporter):
    """The first rank's, which writes.

    Args:
        folder: the run's folder.
        start: iterations that are done already; what an earlier attempt wrote about later ones is dropped.
        world_size: ranks of the run.
        unlike: what sets evaluations apart from the run's own; these go to ``metrics.jsonl`` alone.
    """

    writes = True

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        start: int,
        world_size: int,
        unlike: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(config)
        self._folder = folder
        self._unlike = unlike or {}
        trains = start < self._total and not config.train.skip_train
        resume_after = start if trains else None
        self._lines = JsonLines(folder / METRICS, resume_after)
        self._charts = open_charts(config, folder, resume_after)
        self._schedules: JsonLines | None = None
        self._of_every_schedule: dict[str, int] = {}
        model = config.model
        if model.sequence_packing_scheduler is not None:
            self._schedules = JsonLines(folder / SCHEDULES, resume_after)
            self._of_every_schedule = {
                "context_parallel_size": model.context_parallel_size,
                **what_keeps_step(model, layout_of(config, world_size)),
            }
        self._progress = ProgressLine(self._total, start) if wants_live_line(config) else None
        self._since_log: list[StepMetrics] = []
        self._ends: deque[float] = deque([time.monotonic()], maxlen=_STEPS_TO_JUDGE_BY + 1)

    def step(self, metrics: StepMetrics, interval: Interval | None = None) -> None:
        values = asdict(metrics)
        del values["iteration"]
        values |= _named_mtp_losses(values.pop("mtp_losses")) | values.pop("router_losses")
        values = {name: value for name, value in values.items() if value is not None or name not in _OPTIONAL}
        if interval is not None:
            values |= {"timers_s": interval.seconds, "peak_memory_bytes": interval.peak_memory_bytes}
        self._write(metrics.iteration, values)
        self._ends.append(time.monotonic())
        left = self._seconds_left(metrics.iteration)
        if self._progress is not None:
            self._progress.update(metrics, left)
        self._since_log.append(metrics)
        if self.is_due(metrics.iteration):
            if self._config.logger.progress != "none":
                size = self._config.train.global_batch_size
                logger.info(log_line(self._since_log, self._total, size, left, interval))
            self._since_log = []

    def schedule(self, iteration: int, plan: StepPlan) -> None:
        assert self._schedules is not None
        with writing_into(self._folder):
            self._schedules.write(iteration, record(plan, **self._of_every_schedule))

    def evaluation(self, iteration: int, name: str, loss: float, seconds: float | None = None) -> None:
        with_what = "".join(f", {setting}={value}" for setting, value in self._unlike.items())
        logger.info("%s loss at iteration %d%s: %.6f", name, iteration, with_what, loss)
        values: dict[str, object] = {f"{name}_loss": loss}
        values |= {} if seconds is None else {"evaluation_time_s": seconds}
        if not self._unlike:
            self._write(iteration, values)
        else:
            with writing_into(self._folder):
                self._lines.write(iteration, values | {"measured_with": self._unlike})

    def saved(self, iteration: int, seconds: float) -> None:
        with writing_into(self._folder):
            for chart in self._charts:
                chart.write(iteration, {"checkpoint_time_s": seconds})

    def close(self) -> None:
        for each in (self._progress, self._lines, *self._charts, self._schedules):
            if each is not None:
                with writing_into(self._folder):  # what was left to write
                    each.close()

    def _write(self, iteration: int, values: Mapping[str, object]) -> None:
        with writing_into(self._folder):
            for sink in (self._lines, *self._charts):
                sink.write(iteration, values)

    def _seconds_left(self, iteration: int) -> float:
        """At the pace of the last steps, evaluation and checkpoints included."""
        return (self._total - iteration) * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)


class ProgressLine:
    """A line on the terminal that moves.

    Args:
        total: iterations of the whole run.
        start: iterations that are done already.
    """

    def __init__(self, total: int, start: int) -> None:
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console(),
        )
        self._task = self._progress.add_task("training", total=total, completed=start, status="", left="")
        self._progress.start()

    def update(self, metrics: StepMetrics, seconds_left: float) -> None:
        """Show a step that is done."""
        status = f"loss {metrics.lm_loss:.4f} · {metrics.tokens_per_s:,.0f} tokens/s"
        left = f"left {_clock(seconds_left)}"
        self._progress.update(self._task, completed=metrics.iteration, status=status, left=left)

    def close(self) -> None:
        self._progress.stop()


def _named_mtp_losses(losses: Sequence[float]) -> dict[str, float]:
    """By the names that Bridge's users know."""
    return {f"mtp_{depth} loss": loss for depth, loss in enumerate(losses, start=1)}


def log_line(
    steps: Sequence[StepMetrics],
    total: int,
    global_batch_size: int,
    seconds_left: float,
    interval: Interval | None = None,
) -> str:
    """The line that Bridge's users and parsers know, with the means over ``steps``, and what else was measured."""
    last = steps[-1]
    losses = [step.lm_loss for step in steps if not step.skipped and math.isfinite(step.lm_loss)] or [last.lm_loss]
    seconds = sum(step.step_time_s for step in steps) / len(steps)
    # Rates over the interval: work by time, not the mean of the steps' rates.
    tflops = sum(step.tflops_per_device * step.step_time_s for step in steps) / len(steps) / seconds
    tokens = sum(step.tokens_per_s * step.step_time_s for step in steps) / len(steps) / seconds
    further = _named_mtp_losses(last.mtp_losses) | last.router_losses
    entries = [
        f"iteration {last.iteration:8d}/{total:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {tflops:.{1 if tflops >= 10 else 4}f}",
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {global_batch_size:5d}",
        f"lm loss: {sum(losses) / len(losses):.6E}",
        *(f"{name}: {loss:.6E}" for name, loss in further.items()),
        f"loss scale: {last.loss_scale:.1f}",
        *([] if last.grad_norm is None else [f"grad norm: {last.grad_norm:.3f}"]),
        f"number of skipped iterations: {sum(step.skipped for step in steps):3d}",
        f"number of nan iterations: {sum(not math.isfinite(step.lm_loss) for step in steps):3d}",
        f"tokens/s: {tokens:.0f}",
    ]
    if interval is not None:
        entries += [f"{name.replace('_', '-')} (ms): {value * 1e3:.1f}" for name, value in interval.seconds.items()]
        entries.append(f"peak memory (GB): {interval.peak_memory_bytes / 1e9:.2f}")
    return " | ".join([*entries, f"time left {_clock(seconds_left)}"]) + " |"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


_console: Console | None = None


def console() -> Console:
    """The one terminal that log lines and the progress line share (standard error)."""
    global _console
    if _console is None:
        _console = Console(stderr=True)
    return _console


def start_logging(rank: int, live: bool) -> None:
    """Log to standard error: rank 0 at INFO, the others from WARNING on, with their rank in front."""
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    handler: logging.Handler
    if live and rank == 0:
        handler = RichHandler(console=console(), show_path=False, show_level=False, log_time_format="[%X]")
    else:
        handler = logging.StreamHandler()
        prefix = "" if rank == 0 else f"[rank {rank}] "
        handler.setFormatter(logging.Formatter(f"[%(asctime)s] {prefix}%(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    handler.addFilter(PrintableRecords())
    root.addHandler(handler)
    threading.excepthook = _log_thread_failure
    root.setLevel(logging.WARNING)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    # megatron-core logs the deprecation of the model classes that everybody uses, and the same advice on every rank.
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _log_thread_failure(failed: threading.ExceptHookArgs) -> None:
    """In one line, where Python prints a traceback."""
    name = failed.thread.name if failed.thread else "unknown"
    first_line = (str(failed.exc_value).splitlines() or [""])[0]
    logger.error("thread %s failed, everything else goes on: %s: %s", name, failed.exc_type.__name__, first_line)
