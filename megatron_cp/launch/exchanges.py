"""Recognize exceptions of communication between ranks.

torch has no exception type for a lost peer: gloo raises RuntimeError with many texts, also for wrong arguments.
These exceptions count as communication errors:

- an exception of torch.distributed's own types (``DistError``: NCCL, stores);
- a RuntimeError with a frame of torch.distributed in its traceback;
- an exception of a ``.wait()`` call: handles of asynchronous collectives have no Python frame;
- an exception out of autograd's engine, which runs collectives in its own threads and loses their frames.

``HealthMonitor.explain`` then asks the other ranks. The cause is a lost peer if another rank exited or failed, if a
connection broke, or if the exchange took the whole time limit. Otherwise the error is this rank's own and keeps its
traceback.
"""

from __future__ import annotations

import ast
import errno
import linecache
import os
import traceback
from pathlib import Path
from typing import cast

import torch.distributed as dist

_NETWORK_ERRORS = (
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ETIMEDOUT,
)


def is_exchange(error: BaseException) -> bool:
    """Return whether ``error`` came out of communication between ranks."""
    if isinstance(error, dist.DistError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and any(
        _of_torch(frame, "distributed") or _of_torch(frame, "autograd/graph.py") or _is_wait(frame) for frame in frames
    )


def is_network_error(error: BaseException) -> bool:
    """Return whether a connection broke: torch's type, or the system's text."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(os.strerror(number).lower() in text for number in _NETWORK_ERRORS)


def name_of_exchange(error: BaseException) -> str:
    """Name the torch.distributed call that failed, and its caller, from the traceback."""
    collective, caller = "", ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.name == "distributed_c10d.py":
            collective = collective or frame.name
        elif {"megatron_cp", "megatron"} & set(path.parts) and not collective:
            caller = f"{path.stem}.{frame.name}"
    return f"{collective or 'an exchange'} in {caller}" if caller else collective or "a collective"


def _of_torch(frame: traceback.FrameSummary, part: str) -> bool:
    return f"/torch/{part}" in Path(frame.filename).as_posix()


def _is_wait(frame: traceback.FrameSummary) -> bool:
    """Return whether the call that raised in this frame is a ``.wait(...)``."""
    if None in (frame.lineno, frame.end_lineno, frame.colno, frame.end_colno):
        return False
    first, last = cast(int, frame.lineno), cast(int, frame.end_lineno)
    lines = [linecache.getline(frame.filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][: frame.end_colno]
    lines[0] = lines[0][frame.colno :]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since its import
        return False
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "wait"
