"""One run at a time writes into a folder, which all its nodes see: another run would take its unfinished checkpoints
for leftovers, and a node with a folder of its own could not save its part.

Rank 0 holds a lock of the operating system (POSIX record locks, which network file systems know too) on a file in the
folder. It goes when the process ends, however it ends; processes forked from it do not hold it. What rank 0 writes into
the file all ranks must find there.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megatron_cp.errors import RuntimeFault, shown, shown_ranks
from megatron_cp.parallel.agree import everyones
from megatron_cp.training.metrics import logger
from megatron_cp.training.sinks import writing_into

LOCK = ".lock"
PATIENCE = 120.0  # seconds: a file server takes that long to forget a machine that died
SIGHT = 10.0  # seconds: a network file system may show a new file late
_POLL = 0.5


@contextmanager
def only_run_in(folder: Path, longest_wait: float = math.inf) -> Iterator[None]:
    """Hold the folder; collective. Another run that holds it has a while to end first.

    Args:
        longest_wait: seconds that a rank waits for another before it gives up.

    Raises:
        RuntimeFault: on every rank: another run still writes there, or nothing can be written there, or not all ranks
            see the same folder.
    """
    file, problem, owner = None, "", ""
    try:
        if dist.get_rank() == 0:
            try:
                with writing_into(folder):
                    file = (folder / LOCK).open("a+", encoding="utf-8")
                    problem = _take(file, folder, min(PATIENCE, longest_wait / 2))
                    owner = "" if problem else _sign(file)
            except RuntimeFault as fault:
                problem = str(fault)
        problem, owner = everyones((problem, owner))[0]
        if problem:
            raise RuntimeFault(problem, on_all_ranks=True)
        hosts = everyones("" if _is_of(folder, owner, min(SIGHT, longest_wait / 2)) else socket.gethostname())
        without = [rank for rank, host in enumerate(hosts) if host]
        if without:
            where = shown(list(dict.fromkeys(filter(None, hosts))), ", ")
            raise RuntimeFault(
                f"{folder} is another folder, or none, for {shown_ranks(without)} ({where}) than for rank 0 ({owner}), "
                "nothing was trained. Give a checkpoint.save that all nodes share.",
                on_all_ranks=True,
            )
        yield
    finally:
        if file is not None:
            if owner:
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
            return ""
        file.seek(0)
        who = file.read() or "it does not say which"
        if time.monotonic() - began >= patience:
            return f"another run writes into {folder} ({who}). Let it end, or give this one another checkpoint.save."
        if not waited:
            logger.info("another run writes into %s (%s). Waiting %d s for it to end", folder, who, patience)
        waited = True
        time.sleep(_POLL)


def _sign(file: IO[str]) -> str:
    """Write whose the folder is, to where other nodes see it; returns that."""
    owner = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
    file.truncate(0)
    file.write(owner)
    file.flush()
    os.fsync(file.fileno())
    return owner


def _is_of(folder: Path, owner: str, patience: float) -> bool:
    """Whether the folder that this rank sees is, within ``patience`` seconds, the one that ``owner`` signed."""
    until = time.monotonic() + patience
    while True:
        with suppress(OSError, ValueError):
            if (folder / LOCK).read_text(encoding="utf-8") == owner:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL)
