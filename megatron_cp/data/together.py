"""Preparing files with other ranks around: once per node, and a fault of one rank is the fault of all.

A rank that fails alone leaves the others in their next collective; so every outcome is told to all before anyone goes
on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import torch.distributed as dist

# Not as dist.is_initialized, which datasets.py hides from megatron-core while other ranks wait to hear from this one.
from torch.distributed import is_initialized

from megatron_cp.common.errors import DataError
from megatron_cp.launch import launcher
from megatron_cp.parallel.collectives import everyones

_HEARTBEAT = 20.0  # seconds; well below any timeout of a process group


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
    """``work()`` of rank 0, then of the first rank of each other node, on every rank; collective. It may take long.

    So what work finds done it must not do again: nodes that share a file system find what rank 0 left there, and only
    those with one of their own repeat it. (A node may be late to see a new name; it then does the work in vain.)

    Raises:
        DataError: on every rank, where ``work`` fails on any node, or has another outcome on one of them.
    """
    rank = dist.get_rank() if is_initialized() else 0
    values = _outcomes(work, rank == 0)
    values += _outcomes(work, rank != 0 and launcher.local_rank() == 0)
    if any(value != values[0] for value in values):
        raise DataError(f"the nodes do not have the same data: one finds {values[0]}, another one not. Copy it anew.")
    return values[0]


def _outcomes[T](work: Callable[[], T], mine: bool) -> list[T]:
    """``work()`` of each rank for which it is ``mine``, on every rank; collective.

    The others do not wait in one collective, which would time out, but hear of the work every few seconds.

    Raises:
        DataError: on every rank, where ``work`` fails on one.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(_attempt, work) if mine else None
        while True:
            reports = [report for report in everyones(_report(future)) if report is not None]
            if all(done for done, _, _ in reports):
                break
    for _, _, problem in reports:
        if problem:
            raise DataError(problem)
    return [value for _, value, _ in reports]


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
