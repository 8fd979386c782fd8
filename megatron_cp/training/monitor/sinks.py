"""Metric sinks: ``metrics.jsonl``, TensorBoard, Weights & Biases. Rank 0 only."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.common.jsonl_log import keep_lines_until
from megatron_cp.common.limits import reached_limit
from megatron_cp.config.run_config import LoggerConfig

logger = logging.getLogger(__name__)

Values = Mapping[str, Any]


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Name the run folder in write errors; a full disk's own error does not.

    Raises:
        RuntimeFault: instead of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        why = reached_limit(error) or error.strerror or error
        raise RuntimeFault(
            f"the run folder {folder} cannot be written: {why}. Fix: free disk space or correct the permissions, then "
            "start the run again (resumes from the last checkpoint)"
        ) from error


class Sink(Protocol):
    """Receives the metrics of iterations, in order."""

    def write(self, iteration: int, values: Values) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends one complete line per call.

    The first call drops an earlier attempt's lines after ``resume_after``; ``None`` keeps all.
    """

    def __init__(self, path: Path, resume_after: int | None) -> None:
        self._path, self._resume_after = path, resume_after
        self._file: TextIO | None = None

    def write(self, iteration: int, values: Values) -> None:
        if self._file is None:
            if self._resume_after is not None:
                keep_lines_until(self._path, self._resume_after)
            self._file = self._path.open("a", buffering=1, encoding="utf-8")
        line = {"iteration": iteration} | {name: _strict(value) for name, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Scalars in ``tensorboard/``, flushed after each write.

    Replaces torch's ``SummaryWriter``, whose thread prints a traceback if the disk is full.
    """

    def __init__(self, folder: Path, resume_after: int | None) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._folder = event_pb2, folder
        # TensorBoard reads files in name order; a later attempt must sort last.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with writing_into(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter((folder / name).open("wb"))
            self._write(file_version="brain.Event:2")
            if resume_after is not None:  # hides later steps of an earlier attempt
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._write(step=resume_after + 1, session_log=start)
            self._records.flush()

    def write(self, iteration: int, values: Values) -> None:
        from torch.utils.tensorboard.summary import scalar

        with writing_into(self._folder):
            for name, value in scalars(values).items():
                self._write(step=iteration, summary=scalar(name, value))
            self._records.flush()

    def close(self) -> None:
        with writing_into(self._folder):
            self._records.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event.Event(wall_time=time.time(), **content).SerializeToString())


class WeightsAndBiases:
    """A run of ``logger.wandb_project``; a resumed training continues the same run.

    wandb's variables choose online or offline (``WANDB_MODE=offline`` writes to ``wandb/`` in the run folder).
    """

    def __init__(self, chosen: LoggerConfig, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        number = folder / "wandb_run_id.txt"
        if not number.exists():
            number.write_text(uuid.uuid4().hex[:12])
        self._run: Any = wandb.init(
            project=chosen.wandb_project,
            name=chosen.wandb_exp_name,
            entity=chosen.wandb_entity,
            dir=str(folder),
            id=number.read_text().strip(),
            resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
            config=dict(settings),
        )

    def write(self, iteration: int, values: Values) -> None:
        self._try(lambda: self._run.log(scalars(values), step=iteration))

    def close(self) -> None:
        self._try(lambda: self._run.finish())

    def _try(self, request: Callable[[], object]) -> None:
        if self._run is None:
            return
        try:
            request()
        except Exception as error:
            self._run = None
            _warn_without_wandb(error)


def open_charts(
    chosen: LoggerConfig, folder: Path, resume_after: int | None, settings: Mapping[str, Any]
) -> list[Sink]:
    """Open TensorBoard and Weights & Biases, if configured; see :class:`JsonLines`.

    ``settings`` are the run's as written, for Weights & Biases.
    """
    charts: list[Sink] = []
    if chosen.tensorboard:
        charts.append(TensorBoard(Path(chosen.tensorboard_dir or folder / "tensorboard"), resume_after))
    if chosen.wandb_project:
        try:
            charts.append(WeightsAndBiases(chosen, folder, settings))
        except Exception as error:  # no network, no key, a broken installation: training continues
            _warn_without_wandb(error)
    return charts


def _warn_without_wandb(error: Exception) -> None:
    logger.warning(
        "Weights & Biases is off, training continues: %s (%s). Set WANDB_MODE=offline to log without a network",
        error,
        type(error).__name__,
    )


def scalars(values: Values) -> dict[str, float]:
    """Return numbers only; entries of mappings become ``name/key``."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        entries = value.items() if isinstance(value, Mapping) else [(None, value)]
        for key, number in entries:
            if isinstance(number, bool | int | float):
                flat[name if key is None else f"{name}/{key}"] = float(number)
    return flat


def _strict(value: Any) -> Any:
    """Replace nan and infinity, which JSON lacks, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
