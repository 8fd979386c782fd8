"""What a run tells: log lines, a live progress line, ``metrics.jsonl`` and TensorBoard. Rank 0 alone writes."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_cp.config import RunConfig

logger = logging.getLogger("megatron_cp")


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``. Times in seconds, rates a second over the whole world unless named otherwise."""

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


def wants_live_line(config: RunConfig) -> bool:
    """Whether rank 0 draws a moving progress line: asked for, or "auto" on a terminal."""
    choice = config.logger.progress
    return choice == "rich" or (choice == "auto" and sys.stderr.isatty())


class Reporter:
    """Rank 0's view of the run; on other ranks every method does nothing."""

    def __init__(self, config: RunConfig, folder: Path, total: int, start: int, enabled: bool) -> None:
        self._config = config
        self._total = total
        self._enabled = enabled
        self._progress: Progress | None = None
        self._writer: Any = None
        self._file: Any = None
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _drop_lines_after(path, start)
        self._file = path.open("a", buffering=1)
        if config.logger.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(config.logger.tensorboard_dir or str(folder / "tensorboard"), purge_step=start)
        if wants_live_line(config):
            self._progress = Progress(
                TextColumn("[bold]training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console(),
            )
            self._task = self._progress.add_task("training", total=total, completed=start, status="")
            self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Record one optimizer step."""
        if not self._enabled:
            return
        values = asdict(metrics)
        self._file.write(json.dumps(values) + "\n")
        if self._writer is not None:
            for name, value in values.items():
                if name != "iteration" and value is not None:
                    self._writer.add_scalar(name, value, metrics.iteration)
        if self._progress is not None:
            status = f"loss {metrics.lm_loss:.4f} · {metrics.tokens_per_s:,.0f} tokens/s"
            self._progress.update(self._task, completed=metrics.iteration, status=status)
        if metrics.iteration % self._config.logger.log_interval == 0 or metrics.iteration == self._total:
            logger.info(log_line(metrics, self._total, self._config.train.global_batch_size))

    def evaluation(self, iteration: int, name: str, loss: float) -> None:
        """Record the loss on held-out data."""
        if not self._enabled:
            return
        logger.info("%s loss at iteration %d: %.6f", name, iteration, loss)
        self._file.write(json.dumps({"iteration": iteration, f"{name}_loss": loss}) + "\n")
        if self._writer is not None:
            self._writer.add_scalar(f"{name}_loss", loss, iteration)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._file.close()


def log_line(metrics: StepMetrics, total: int, global_batch_size: int) -> str:
    """The line that Bridge's users know, one an iteration."""
    grad_norm = "none" if metrics.grad_norm is None else f"{metrics.grad_norm:.3f}"
    return (
        f"iteration {metrics.iteration:8d}/{total:8d} | consumed samples: {metrics.consumed_samples:12d} | "
        f"elapsed time per iteration (ms): {metrics.step_time_s * 1e3:.1f} | "
        f"throughput per device (TFLOP/s): {metrics.tflops_per_device:.3f} | tokens/s: {metrics.tokens_per_s:.0f} | "
        f"learning rate: {metrics.learning_rate:.6E} | global batch size: {global_batch_size:5d} | "
        f"lm loss: {metrics.lm_loss:.6E} | grad norm: {grad_norm} | "
        f"number of skipped iterations: {int(metrics.skipped):3d} |"
    )


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
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    # megatron-core logs the deprecation of the model classes that everybody uses, and the same advice on every rank.
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _drop_lines_after(path: Path, iteration: int) -> None:
    """Resuming from an older checkpoint repeats iterations: their first lines go."""
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    kept = [line for line in lines if json.loads(line).get("iteration", 0) <= iteration]
    if len(kept) != len(lines):
        path.write_text("".join(f"{line}\n" for line in kept))


class Stopwatch:
    """Seconds since it was last read."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self._last = time.perf_counter()

    def lap(self) -> float:
        self._synchronize()
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed
