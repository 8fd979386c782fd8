"""One run at a time writes into a folder: another would take its unfinished checkpoints for leftovers.

Rank 0 holds a lock of the operating system (POSIX record locks, which network file systems know too) on a file in the
folder. It goes when the process ends, however it ends; processes forked from it do not hold it.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megatron_cp.errors import RuntimeFault
from megatron_cp.parallel.agree import everyones
from megatron_cp.training.metrics import logger
from megatron_cp.training.sinks import writing_into

LOCK = ".lock"
PATIENCE = 120.0  # seconds: a file server takes that long to forget a machine that died
_POLL = 0.5


@contextmanager
def only_run_in(folder: Path, longest_wait: float = math.inf) -> Iterator[None]:
    """Hold the folder; collective. Another run that holds it has a while to end first.

    Args:
        longest_wait: seconds that a rank waits for another before it gives up.

    Raises:
        RuntimeFault: on every rank: another run still writes there, or nothing can be written there.
    """
    file, problem = None, ""
    try:
        if dist.get_rank() == 0:
            try:
                with writing_into(folder):
                    file = (folder / LOCK).open("a+", encoding="utf-8")
                    problem = _take(file, folder, min(PATIENCE, longest_wait / 2))
            except RuntimeFault as fault:
                problem = str(fault)
        problem = everyones(problem)[0]
        if problem:
            raise RuntimeFault(problem, on_all_ranks=True)
        yield
    finally:
        if file is not None:
            if not problem:
                file.truncate(0)
            file.close()


def _take(file: IO[str], folder: Path, patience: float) -> str:
    """Take the lock; or why it is another's after ``patience`` seconds."""
    began, waited = time.monotonic(), False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.info("nothing keeps a second run out of %s, which knows no locks: %s", folder, error.strerror)
                return ""
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
            file.flush()
            return ""
        file.seek(0)
        who = file.read() or "it does not say which"
        if time.monotonic() - began >= patience:
            return f"another run writes into {folder} ({who}). Let it end, or give this one another checkpoint.save."
        if not waited:
            logger.info("another run writes into %s (%s). Waiting %d s for it to end", folder, who, patience)
        waited = True
        time.sleep(_POLL)
