"""Write files and folders atomically: readers see the old content or the new."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path


@contextmanager
def atomic_write(*paths: Path, only_writer: bool = False) -> Iterator[list[Path]]:
    """Yield a temporary path beside each path, and rename them at the end.

    If the body raises, ``paths`` stay unchanged and the temporary files are deleted. Several paths are one set of
    files in one folder: processes rename their sets one after the other. An old file of the last path is removed first,
    so that an interruption leaves no mixed set.

    Args:
        only_writer: no other process writes to ``paths``. Leftovers of a killed process are then overwritten.

    Raises:
        OSError: renaming failed: a folder that is not empty is not replaced.
    """
    mark = "" if only_writer else f"-{uuid.uuid4().hex[:8]}"  # process ids may repeat on another node
    partial = [path.with_name(f".{path.name}.partial{mark}") for path in paths]
    try:
        yield partial
        with _locked(paths[0].parent) if len(paths) > 1 else nullcontext():
            if len(paths) > 1 and paths[-1].is_file():
                paths[-1].unlink()
            for new, path in zip(partial, paths, strict=True):
                os.replace(new, path)
    finally:
        for each in partial:
            shutil.rmtree(each, ignore_errors=True) if each.is_dir() else each.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes' renames, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, survives_power_loss: bool = False) -> None:
    """Replace a file's text atomically; one process at a time may write it.

    Args:
        survives_power_loss: wait until the file and its name are on the disk.

    Raises:
        OSError: writing failed; the file is unchanged.
    """
    with atomic_write(path, only_writer=True) as (partial,):
        partial.write_text(text, encoding="utf-8")
        if survives_power_loss:
            to_disk(partial)
    if survives_power_loss:
        to_disk(path.parent)


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
