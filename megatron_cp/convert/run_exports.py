"""Exports in a run's folder, reused while the checkpoint is unchanged."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.common.terminal import say
from megatron_cp.convert.origin import RunExport, folder_of_export, is_of, size_of
from megatron_cp.training.checkpoint.file_lock import FileLock
from megatron_cp.training.checkpoint.files import existing_folder, latest_iteration


def export_of_run(root: Path, iteration: int | None, typed: str) -> RunExport:
    """Return the export of a run's checkpoint; make it if there is none.

    Args:
        iteration: of the checkpoint; by default the latest.
        typed: what users write before the run's folder; begins messages.

    Raises:
        ConfigError, DataError: there is no such checkpoint, or it cannot be exported.
        RuntimeFault: the checkpoint is damaged, or the export could not be written.
    """
    known = latest_iteration(root) if iteration is None else iteration
    checkpoint = None if known is None else existing_folder(root, known)
    if known is None or checkpoint is None:
        return _in_own_process(root, iteration, typed)
    folder = folder_of_export(root, known)
    if not is_of(folder, checkpoint):
        with _alone(folder.parent):
            if not is_of(folder, checkpoint):  # another process may have made it meanwhile
                return _in_own_process(root, iteration, typed)
    return RunExport(folder, f"reusing the export of {checkpoint}: {folder} ({size_of(folder)})")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process writes exports into ``folder``.

    If it cannot be written, the export says so.
    """
    lock = FileLock(folder / ".lock")
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        if lock.take() is not None:
            say("waiting for another process that exports into", folder, file=sys.stderr, flush=True)
            while lock.take() is not None:
                time.sleep(0.5)
    try:
        yield
    finally:
        lock.release()


def _in_own_process(root: Path, iteration: int | None, typed: str) -> RunExport:
    # A process of its own: megatron-core is prepared for a machine without GPUs, and host memory is returned. Not
    # forked: a process that has used torch has threads and objects that do not survive it.
    with ProcessPoolExecutor(1, get_context("spawn"), _start_process) as pool:
        try:
            return pool.submit(_export, root, iteration, typed).result()
        except BrokenProcessPool as error:
            run = shlex.quote(str(root))
            raise RuntimeFault(
                f"{root}: the process that exported the checkpoint was killed, probably for lack of memory. Fix: "
                f"megatron-cp convert export --megatron-path {run} --hf-path FOLDER (on a machine with more memory)"
            ) from error


def _start_process() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # deprecations of model classes, as in the command itself


def _export(root: Path, iteration: int | None, typed: str) -> RunExport:
    from megatron_cp.convert.exporting import export_into_run  # megatron-core

    return export_into_run(root, iteration, typed)
