"""Exports in a run's folder, reused while the checkpoint is unchanged."""

from __future__ import annotations

import os
import shlex
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.convert.origin import RunExport, folder_of_export, is_of, size_of
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
    if known is not None and checkpoint is not None:
        folder = folder_of_export(root, known)
        if is_of(folder, checkpoint):
            return RunExport(folder, f"reusing the export of {checkpoint}: {folder} ({size_of(folder)})")
    # A process of its own: megatron-core is prepared for a machine without GPUs, and host memory is returned.
    with ProcessPoolExecutor(1, get_context("fork"), _hide_gpus) as pool:
        try:
            return pool.submit(_export, root, iteration, typed).result()
        except BrokenProcessPool as error:
            run = shlex.quote(str(root))
            raise RuntimeFault(
                f"{root}: the process that exported the checkpoint was killed, probably for lack of memory. Fix: "
                f"megatron-cp convert export --megatron-path {run} --hf-path FOLDER (on a machine with more memory)"
            ) from error


def _hide_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _export(root: Path, iteration: int | None, typed: str) -> RunExport:
    from megatron_cp.convert.exporting import export_into_run  # megatron-core

    return export_into_run(root, iteration, typed)
