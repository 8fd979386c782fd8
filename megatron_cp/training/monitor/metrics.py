"""Log lines, progress line and metric sinks of a run; rank 0 writes."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_cp.common.jsonl_log import METRICS, SCHEDULES
from megatron_cp.common.limits import in_one_line
from megatron_cp.common.terminal import PrintableRecords
from megatron_cp.config.run_config import LoggerConfig
from megatron_cp.dynamic_cp.analysis.recorded import record
from megatron_cp.dynamic_cp.runtime.iterator import StepPlan
from megatron_cp.training.monitor.peak import Peak
from megatron_cp.training.monitor.phases import Interval
from megatron_cp.training.monitor.sinks import JsonLines, Sink, open_charts, writing_into
from megatron_cp.training.monitor.step_metrics import HeldOutLoss, StepMetrics, clock, log_line

logger = logging.getLogger("megatron_cp")

_STEPS_TO_JUDGE_BY = 100  # steps that the time left is estimated from


def shows_progress_line(choice: str) -> bool:
    """Return whether rank 0 draws a progress line (``logger.progress``, terminal)."""
    return choice == "rich" or (choice == "auto" and sys.stderr.isatty())


class Reporter:
    """Logs a run's progress; only rank 0 writes.

    Args:
        folder: the run's folder.
        start: iterations that are done already.
        writes: whether this rank writes; callers may skip the work for reports otherwise.
        trains: whether training follows; lines of later steps from an earlier attempt are then dropped.
        schedule_fields: fields of every line of ``schedules.jsonl``; None for a run without packing.
        run_settings: all settings as written, for charts.
        unlike: settings in which evaluations differ from the run's; these evaluations go to ``metrics.jsonl`` only.
        peak: the reference of the MFU; without it no MFU is written.
    """

    def __init__(
        self,
        settings: LoggerConfig,
        train_iters: int,
        folder: Path,
        start: int = 0,
        *,
        writes: bool = True,
        trains: bool = True,
        schedule_fields: Mapping[str, int] | None = None,
        run_settings: Mapping[str, object] | None = None,
        unlike: Mapping[str, object] | None = None,
        peak: Peak | None = None,
    ) -> None:
        self.writes = writes
        self._settings = settings
        self._total = train_iters
        self._folder = folder
        self._unlike = unlike or {}
        self._peak = peak
        resume_after = start if trains else None
        self._lines = JsonLines(folder / METRICS, resume_after)
        self._charts = open_charts(settings, folder, resume_after, run_settings or {}) if writes else []
        self._schedules = None if schedule_fields is None else JsonLines(folder / SCHEDULES, resume_after)
        self._schedule_fields = schedule_fields or {}
        live = writes and shows_progress_line(settings.progress)
        self._progress = ProgressLine(self._total, start) if live else None
        self._since_log: list[StepMetrics] = []
        self._ends: deque[float] = deque([time.monotonic()], maxlen=_STEPS_TO_JUDGE_BY + 1)

    def is_due(self, iteration: int) -> bool:
        """Return whether this iteration is logged; equal on every rank."""
        return iteration % self._settings.log_interval == 0 or iteration == self._total

    def step(self, metrics: StepMetrics, interval: Interval | None = None) -> None:
        """Record one optimizer step, and the log interval that ends with it."""
        values = metrics.values(self._peak)
        if interval is not None:
            values |= {"timers_s": interval.seconds, "peak_memory_bytes": interval.peak_memory_bytes}
        self._write(metrics.iteration, values, self._lines, *self._charts)
        self._ends.append(time.monotonic())
        # Includes evaluation and checkpoint time.
        left = (self._total - metrics.iteration) * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        if self._progress is not None:
            self._progress.update(metrics, left)
        self._since_log.append(metrics)
        if self.is_due(metrics.iteration):
            if self._settings.progress != "none":
                logger.info(log_line(self._since_log, self._total, left, self._peak, interval))
            self._since_log = []

    def schedule(self, iteration: int, plan: StepPlan) -> None:
        """Record the schedule of a packed step in ``schedules.jsonl``."""
        assert self._schedules is not None
        self._write(iteration, record(plan, **self._schedule_fields), self._schedules)

    def evaluation(self, iteration: int, name: str, loss: HeldOutLoss, seconds: float | None = None) -> None:
        """Record a held-out loss and the evaluation time."""
        with_what = "".join(f", {setting}={value}" for setting, value in self._unlike.items())
        logger.info("%s loss at iteration %d%s: %s", name, iteration, with_what, loss)
        values = loss.values(name)
        values |= {} if seconds is None else {"evaluation_time_s": seconds}
        if self._unlike:
            self._write(iteration, values | {"measured_with": self._unlike}, self._lines)
        else:
            self._write(iteration, values, self._lines, *self._charts)
        if len(self._ends) == 1:  # an evaluation before the first step does not say how long steps take
            self._ends[0] = time.monotonic()

    def saved(self, iteration: int, seconds: float) -> None:
        """Record in charts how long a save paused training.

        ``metrics.jsonl`` has the time among the phases.
        """
        self._write(iteration, {"checkpoint_time_s": seconds}, *self._charts)

    def close(self) -> None:
        """Close all sinks."""
        for each in (self._progress, self._lines, *self._charts, self._schedules):
            if each is not None:
                with writing_into(self._folder):  # closing may still write
                    each.close()

    def _write(self, iteration: int, values: Mapping[str, object], *sinks: Sink) -> None:
        with writing_into(self._folder):
            for sink in sinks if self.writes else ():
                sink.write(iteration, values)


class ProgressLine:
    """A progress line on the terminal.

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
        """Show a finished step."""
        status = f"loss {metrics.lm_loss:.4f} · {metrics.tokens_per_s:,.0f} tokens/s"
        left = f"left {clock(seconds_left)}"
        self._progress.update(self._task, completed=metrics.iteration, status=status, left=left)

    def close(self) -> None:
        self._progress.stop()


@cache
def console() -> Console:
    """Return the terminal of log lines and progress line (standard error)."""
    return Console(stderr=True)


def start_logging(rank: int, live: bool) -> None:
    """Log to standard error, rank 0 from INFO on and other ranks from WARNING on.

    Other ranks prefix their lines with the rank.
    """
    handler: logging.Handler
    if live and rank == 0:
        handler = RichHandler(console=console(), show_path=False, show_level=False, log_time_format="[%X]")
    else:
        handler = logging.StreamHandler()
        prefix = "" if rank == 0 else f"[rank {rank}] "
        handler.setFormatter(logging.Formatter(f"[%(asctime)s] {prefix}%(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    handler.addFilter(PrintableRecords())
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    threading.excepthook = _log_thread_failure
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    # megatron-core logs deprecations of common model classes on every rank.
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _log_thread_failure(failed: threading.ExceptHookArgs) -> None:
    """Log a thread's exception in one line, without a traceback."""
    name = failed.thread.name if failed.thread else "unknown"
    what = in_one_line(failed.exc_value or failed.exc_type())
    logger.error("thread %s failed, the run continues: %s", name, what)
