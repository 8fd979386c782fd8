"""Checkpoint folders: complete or absent, even if a process or machine crashes.

A checkpoint is written into a folder that starts with a dot, checked, renamed to ``iter_NNNNNNN``, and only then named
in ``latest_checkpointed_iteration.txt``. Leftovers of a crash also start with a dot; the next run or save deletes them.
All functions run in one process, without communication.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_cp.common.atomic_files import to_disk, write_text
from megatron_cp.common.errors import ConfigError, UnusableCheckpoint, join_limited
from megatron_cp.common.input_files import read_bytes
from megatron_cp.config.names import NAME
from megatron_cp.mcore.checkpoint_index import read_index

LATEST = "latest_checkpointed_iteration.txt"


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int | None:
    """Return the newest complete checkpoint's iteration, ``None`` if there is none.

    Without the latest-iteration file, the newest folder counts: folders get their name when they are complete.

    Raises:
        ConfigError: the latest-iteration file cannot be read.
    """
    path = Path(root) / LATEST
    if not os.path.exists(path):  # unlike Path.exists, never raises
        return max(saved_iterations(root), default=None)
    try:
        content, why = read_bytes(path, 100).removeprefix(codecs.BOM_UTF8), ""
    except OSError as error:
        content, why = b"", f" ({error.strerror})"
    if not re.fullmatch(rb"[0-9]{1,18}\r?\n?", content):
        others = saved_iterations(root)
        fix = f"echo {others[-1]} > {path}" if others else f"{NAME.checkpoint.load}=FOLDER (another run folder)"
        raise ConfigError(f"{path} does not hold an iteration number{why or f': {content[:40]!r}'}. Fix: {fix}")
    return int(content)


def newer_than_latest(root: str | Path) -> int | None:
    """Return the newest iteration if the latest-iteration file names an older one.

    Possible after a crash between rename and file, after going back, or after a bit error in the file.
    """
    newest = max(saved_iterations(root), default=None)
    return newest if newest is not None and newest != latest_iteration(root) else None


def existing_folder(root: str | Path, iteration: int) -> Path | None:
    """Find a checkpoint's folder, also if a crash interrupted its replacement."""
    final = checkpoint_folder(root, iteration)
    return next((path for path in (final, _replaced(final)) if os.path.isdir(path)), None)


def saved_iterations(root: str | Path) -> list[int]:
    """List the iterations of all checkpoints in ``root``, ascending."""
    if not os.path.isdir(root):
        return []
    names = (path.name.removeprefix("iter_") for path in Path(root).glob("iter_*") if os.path.isdir(path))
    return sorted(int(name) for name in names if name.isdecimal())


def suggest_folder(root: str | Path, typed: Callable[[Path, int | None], str]) -> str:
    """Suggest what to type instead of a folder without checkpoints.

    For a checkpoint's folder its run folder, for a folder of runs the first run; else "". ``typed`` formats a run
    folder and an iteration (None: the latest).
    """
    path = Path(root)
    run, iteration = path.parent, path.name.removeprefix("iter_")
    others = saved_iterations(run) if path.name.startswith("iter_") and iteration.isdecimal() else []
    if others and int(iteration) in others:
        return typed(run, int(iteration))
    if others:
        return f"{typed(run, others[-1])} (the newest checkpoint of {run})"
    runs = sorted(inside.name for inside in path.glob("*") if saved_iterations(inside)) if os.path.isdir(path) else []
    return f"{typed(path / runs[0], None)} (run folders in {path}: {join_limited(runs, ', ')})" if runs else ""


def create_partial(final: Path) -> Path:
    """Create the folder that a checkpoint is written into before it becomes ``final``.

    The name is new each time: a writer that outlived its run must not write into the next run's files.
    """
    partial = final.with_name(f".{final.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    return partial


def damage(folder: str | Path) -> list[str]:
    """List missing or short files of a checkpoint, from its index. Reads no tensors."""
    folder = Path(folder)
    try:
        stored = read_index(folder).storage_data
    except UnusableCheckpoint as error:
        return [str(error)]
    needed: dict[str, int] = defaultdict(int)
    for place in stored.values():
        needed[place.relative_path] = max(needed[place.relative_path], place.offset + place.length)
    problems = []
    for name, size in sorted(needed.items()):
        path = folder / name
        if not path.exists():
            problems.append(f"{path} is missing")
        elif path.stat().st_size < size:
            problems.append(f"{path} has {path.stat().st_size} bytes, expected {size}")
    return problems


def stored_tensors(folder: str | Path) -> dict[str, TensorStorageMetadata]:
    """Return a checkpoint's tensor metadata by name, from the index alone.

    Each has the whole ``size`` and ``properties.dtype``. megatron-core's ``load_tensors_metadata`` fails with torch
    2.15, which added properties.
    """
    stored = read_index(Path(folder)).state_dict_metadata.items()
    return {name: each for name, each in stored if isinstance(each, TensorStorageMetadata)}


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a written checkpoint to ``final``, then record it as the latest.

    A crash between the two leaves the older checkpoint as the latest, and valid.

    Raises:
        OSError: the written files are incomplete, or a file cannot be renamed.
    """
    problems = damage(partial)
    if problems:
        raise OSError(f"the written files are incomplete: {'; '.join(problems[:4])}")
    for path in partial.iterdir():
        to_disk(path)
    to_disk(partial)
    replaced = _replaced(final)
    if final.exists():
        discard(replaced)
        final.rename(replaced)
    partial.rename(final)
    to_disk(final.parent)
    write_text(final.parent / LATEST, str(int(final.name.removeprefix("iter_"))), survives_power_loss=True)
    discard(replaced)


def keep_most_recent(root: str | Path, newest: int, count: int, retain_interval: int | None) -> None:
    """Delete checkpoints up to ``newest``, except the ``count`` newest.

    Multiples of ``retain_interval`` are kept too. ``count`` below 1 keeps all, or the newest if there is an interval.
    Checkpoints after ``newest`` (left by a run that went back) are kept.
    """
    if count < 1:
        if retain_interval is None:
            return
        count = 1
    older = [iteration for iteration in saved_iterations(root) if iteration <= newest][:-count]
    for iteration in older:
        if retain_interval is None or iteration % retain_interval:
            discard(checkpoint_folder(root, iteration))


def discard(folder: Path) -> None:
    """Delete a checkpoint, so that a crash leaves nothing that looks like one."""
    if not folder.exists():
        return
    condemned = folder.with_name(f".{folder.name.lstrip('.')}.deleted-{uuid.uuid4().hex[:8]}")
    folder.rename(condemned)
    shutil.rmtree(condemned, ignore_errors=True)


def clean_leftovers(root: str | Path) -> None:
    """Delete partial checkpoints in ``root``, and restore what they were replacing."""
    for path in sorted(Path(root).glob(".iter_*")):
        final = path.with_name(path.name.split(".")[1])
        if path == _replaced(final) and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")
