"""Preparing files with other ranks around: once per node, and a fault of one rank is the fault of all.

A rank that fails alone leaves the others in their next collective; so every outcome is told to all before anyone goes
on.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Not as dist.is_initialized, which datasets.py hides from megatron-core while other ranks wait to hear from this one.
from torch.distributed import is_initialized

from megatron_cp.errors import DataError
from megatron_cp.parallel.agree import everyones

_HEARTBEAT = 20.0  # seconds; well below any timeout of a process group


def _is_first_on_node() -> bool:
    if not is_initialized():
        return True
    return int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0


def on_every_rank[T](work: Callable[[], T]) -> T:
    """``work()`` of this rank, if it succeeds on every rank; collective.

    Raises:
        DataError: on every rank, what the first rank at fault says.
    """
    value, problem = _attempt(work)
    for other in everyones(problem):
        if other:
            raise DataError(other)
    return value  # type: ignore[return-value]


def once_per_node[T](work: Callable[[], T]) -> T:
    """``work()`` of the first rank of each node, on every rank; collective. It may take long and be long.

    The others do not wait in one collective, which would time out, but hear of the work every few seconds.

    Raises:
        DataError: on every rank, where ``work`` fails on any node, or has another outcome on one of them.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(_attempt, work) if _is_first_on_node() else None
        while True:
            reports = [report for report in everyones(_report(future)) if report is not None]
            if all(done for done, _, _ in reports):
                break
    for _, _, problem in reports:
        if problem:
            raise DataError(problem)
    values = [value for _, value, _ in reports]
    if any(value != values[0] for value in values):
        raise DataError(f"the nodes do not have the same data: one finds {values[0]}, another one not. Copy it anew.")
    return values[0]


def build_cached(fill: Callable[[Path], Any], folder: Path) -> None:
    """Fill ``folder``, aside and renamed, so that an interrupted build is never read; nothing if it exists.

    Two nodes on one file system may both build; the second finds the name taken and uses it.

    Raises:
        DataError: it cannot be written, or what ``fill`` raises.
    """
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = tempfile.mkdtemp(dir=folder.parent, prefix=f".building-{socket.gethostname()}-")
        try:
            fill(Path(aside))
            with suppress(OSError):  # another node was quicker
                os.rename(aside, folder)
            if not folder.exists():
                raise DataError(f"{folder}: the sample index could not be put in place.")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{error.filename or folder.parent}: the sample index cannot be written ({error.strerror}); "
            "set dataset.path_to_cache to a folder that can be."
        ) from error


def _attempt[T](work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Result, or what went wrong with the data."""
    try:
        return work(), None
    except DataError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.filename or 'a data file'}: cannot be read: {error.strerror or error}."


def _report(future: Future[tuple[Any, str | None]] | None) -> tuple[bool, Any, str | None] | None:
    """How this rank's work stands after at most a heartbeat: (done, value, problem), None if it has none."""
    if future is None:
        return None
    wait_for([future], timeout=_HEARTBEAT)
    return (True, *future.result()) if future.done() else (False, None, None)
