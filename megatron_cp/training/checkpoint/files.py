"""The folders of checkpoints: complete or absent, whenever a process dies or the machine stops.

A checkpoint is written into a folder that starts with a dot, checked, renamed to ``iter_NNNNNNN``, and only then named
in ``latest_checkpointed_iteration.txt``. Whatever a crash leaves behind starts with a dot too, and is cleaned away by
the next run or the next save. All of this is one process's work; nothing here talks to other ranks.
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
from megatron_cp.common.errors import ConfigError, UnusableCheckpoint, shown
from megatron_cp.common.input_files import read_bytes
from megatron_cp.config.names import NAME
from megatron_cp.mcore.checkpoint_index import read_index

LATEST = "latest_checkpointed_iteration.txt"


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int | None:
    """The newest complete checkpoint's iteration, ``None`` if there is none.

    Without the file that names it the newest folder: a checkpoint gets its name when it is complete, the file after it.

    Raises:
        ConfigError: the file that names it cannot be read.
    """
    path = Path(root) / LATEST
    if not os.path.exists(path):  # which, unlike Path.exists, never raises
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
    """The newest checkpoint's iteration, where the file that names the latest names an older one.

    So it is after a crash between the two, after a run that went back, and where a bit of the file has changed.
    """
    newest = max(saved_iterations(root), default=None)
    return newest if newest is not None and newest != latest_iteration(root) else None


def existing_folder(root: str | Path, iteration: int) -> Path | None:
    """Where a checkpoint lies: in its place, or beside it if a crash came while it was being replaced."""
    final = checkpoint_folder(root, iteration)
    return next((path for path in (final, _replaced(final)) if os.path.isdir(path)), None)


def saved_iterations(root: str | Path) -> list[int]:
    """The iterations that ``root`` has a checkpoint of, ascending."""
    if not os.path.isdir(root):
        return []
    names = (path.name.removeprefix("iter_") for path in Path(root).glob("iter_*") if os.path.isdir(path))
    return sorted(int(name) for name in names if name.isdecimal())


def what_is_meant(root: str | Path, typed: Callable[[Path, int | None], str]) -> str:
    """What to type instead of a folder without checkpoints: of one of them its run, of several runs one of theirs.

    Empty where nothing can be told. ``typed`` writes a run's folder, and an iteration of it or None for the latest.
    """
    path = Path(root)
    run, iteration = path.parent, path.name.removeprefix("iter_")
    others = saved_iterations(run) if path.name.startswith("iter_") and iteration.isdecimal() else []
    if others and int(iteration) in others:
        return typed(run, int(iteration))
    if others:
        return f"{typed(run, others[-1])} (the newest checkpoint of {run})"
    runs = sorted(inside.name for inside in path.glob("*") if saved_iterations(inside)) if os.path.isdir(path) else []
    return f"{typed(path / runs[0], None)} (run folders in {path}: {shown(runs, ', ')})" if runs else ""


def create_partial(final: Path) -> Path:
    """Make the folder to write a checkpoint into before it gets its place ``final``.

    Its name is new each time: a writer that outlived its run must not write into the next run's files.
    """
    partial = final.with_name(f".{final.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    return partial


def damage(folder: str | Path) -> list[str]:
    """What is missing from a checkpoint, by its own index: files that are gone or too short. Reads no tensors."""
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
    """A checkpoint's tensors by name, each with its whole ``size`` and ``properties.dtype``; reads its index alone.

    megatron-core's ``load_tensors_metadata`` cannot, with torch 2.15, which has more properties than it hands on.
    """
    stored = read_index(Path(folder)).state_dict_metadata.items()
    return {name: each for name, each in stored if isinstance(each, TensorStorageMetadata)}


def put_in_place(partial: Path, final: Path) -> None:
    """Rename, then name it the latest: a crash between the two leaves the older checkpoint the latest, and valid.

    Raises:
        OSError: what was written is damaged, or a file cannot be renamed.
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
    """Delete what is older than the ``count`` newest checkpoints up to ``newest``, but multiples of the interval.

    ``count`` below 1 keeps all, or, with an interval, the newest. Checkpoints after ``newest`` (a run that went back
    to an older one leaves them) stay.
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
    """Delete a checkpoint; a crash on the way leaves nothing that looks like one."""
    if not folder.exists():
        return
    condemned = folder.with_name(f".{folder.name.lstrip('.')}.deleted-{uuid.uuid4().hex[:8]}")
    folder.rename(condemned)
    shutil.rmtree(condemned, ignore_errors=True)


def clean_leftovers(root: str | Path) -> None:
    """Delete what interrupted saves left in ``root``, and put back what they were replacing."""
    for path in sorted(Path(root).glob(".iter_*")):
        final = path.with_name(path.name.split(".")[1])
        if path == _replaced(final) and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")
