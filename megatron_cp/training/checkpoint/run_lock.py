"""Let one run at a time write into a run folder that all nodes share.

Another run would take this run's partial checkpoints for leftovers. A node with a separate folder could not save its
shards. Rank 0 locks a file in the folder (see ``file_lock``) and writes its identity there; all ranks must read the
same text. The lock ends with the process.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import torch.distributed as dist

from megatron_cp.common.errors import RuntimeFault, format_ranks, join_limited
from megatron_cp.config.names import NAME
from megatron_cp.parallel.collectives import broadcast_object, gather_objects
from megatron_cp.training.checkpoint.file_lock import FileLock
from megatron_cp.training.monitor.metrics import logger
from megatron_cp.training.monitor.sinks import writing_into

LOCK = ".lock"
PATIENCE = 120.0  # seconds: time for a file server to drop a dead machine's locks
VISIBILITY_TIMEOUT = 10.0  # seconds: a network file system may show a new file late
_POLL = 0.5

_locks: dict[Path, FileLock] = {}
"""The locks that this process holds, by the folder's name as configured."""


@contextmanager
def lock_run_folder(folder: Path, longest_wait: float = math.inf) -> Iterator[None]:
    """Hold the folder's lock; wait a while for another run to end. Collective.

    Args:
        longest_wait: seconds after which waiting ranks time out.

    Raises:
        RuntimeFault: on every rank, if another run keeps the lock, the folder is not writable, or ranks see different
            folders.
    """
    lock, problem, owner = None, "", ""
    try:
        if dist.get_rank() == 0:
            lock = FileLock(folder / LOCK)
            try:
                with writing_into(folder):
                    _take(lock, folder, min(PATIENCE, longest_wait / 2))
                    owner = _sign(lock)
                _locks[folder] = lock
            except RuntimeFault as fault:
                problem = str(fault)
        problem, owner = broadcast_object((problem, owner))
        if problem:
            raise RuntimeFault(problem, on_all_ranks=True)
        # Rank 0 must not open its file again, which would drop a record lock.
        sees_it = lock is not None or _is_signed_by(folder, owner, min(VISIBILITY_TIMEOUT, longest_wait / 2))
        hosts = gather_objects("" if sees_it else socket.gethostname())
        without = [rank for rank, host in enumerate(hosts) if host]
        if without:
            where = join_limited(list(dict.fromkeys(filter(None, hosts))), ", ")
            raise RuntimeFault(
                f"{NAME.checkpoint.save}={folder}: {format_ranks(without)} ({where}) cannot see the folder of rank 0 "
                f"({owner}); training not started. Fix: set {NAME.checkpoint.save} to a folder that all nodes share",
                on_all_ranks=True,
            )
        yield
    finally:
        if lock is not None:
            _locks.pop(folder, None)
            lock.release()


def check_still_held(folder: Path) -> None:
    """Check before a save that the lock on ``folder`` still works; on rank 0.

    If the folder or the lock file was deleted or moved, the lock is taken again.

    Raises:
        OSError: another run has taken the folder.
    """
    lock = _locks.get(folder)
    if lock is None or lock.in_place:
        return
    lock.release()
    folder.mkdir(parents=True, exist_ok=True)
    holder = lock.take()
    if holder is not None:
        raise OSError(
            f"{NAME.checkpoint.save}={folder}: the folder was deleted or moved during training, and another "
            f"run writes there now ({_holder(holder)}). Fix: set {NAME.checkpoint.save}={folder}-2"
        )
    _sign(lock)
    logger.warning(
        f"warning: {NAME.checkpoint.save}=%s: the folder or the file %s was deleted or moved during training. "
        "The run continues and saves there again, but earlier files are not restored",
        folder,
        LOCK,
    )


def _take(lock: FileLock, folder: Path, patience: float) -> None:
    """Take the lock; raise RuntimeFault with the holder after ``patience`` seconds."""
    began, waited = time.monotonic(), False
    while (holder := lock.take()) is not None:
        if time.monotonic() - began >= patience:
            raise RuntimeFault(
                f"{NAME.checkpoint.save}={folder}: another run writes into this folder ({_holder(holder)}). "
                f"Fix: wait until that run has ended, or set {NAME.checkpoint.save}={folder}-2"
            )
        if not waited:
            message = "another run writes into %s (%s). Waiting %.0f s for that run to end"
            logger.info(message, folder, _holder(holder), patience)
        waited = True
        time.sleep(_POLL)
    if lock.unsupported:
        logger.warning(
            f"warning: {NAME.checkpoint.save}=%s: the file system supports no locks (%s), so a second run could write "
            f"into this folder. To silence this warning, set {NAME.checkpoint.save} to a folder on a file system with "
            "locks (Lustre: mounted with -o flock)",
            folder,
            lock.unsupported,
        )


def _holder(holder: str) -> str:
    return holder or "unknown process"


def _sign(lock: FileLock) -> str:
    """Write this process's identity into the lock file and return it."""
    owner = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
    lock.write(owner)
    return owner


def _is_signed_by(folder: Path, owner: str, patience: float) -> bool:
    """Return whether the lock holds ``owner`` within ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        with suppress(OSError, ValueError):
            if (folder / LOCK).read_text(encoding="utf-8") == owner:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL)
