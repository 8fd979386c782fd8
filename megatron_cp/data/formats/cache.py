"""Folders of what is computed once from data files: where they lie, when they are made anew, how they are written.

A data file counts as unchanged while its path, its size and its modification time are the same: telling so costs no
reading, so that every rank can afford it at every start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.common.atomic_files import written_aside
from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME


def cache_root(path_to_cache: str | None, data_file: str | Path) -> Path:
    """``path_to_cache``, or without one the folder ``cache`` beside ``data_file``."""
    return Path(path_to_cache) if path_to_cache else Path(data_file).absolute().parent / "cache"


def cache_key(*parts: Any) -> str:
    """16 letters that change with ``parts``, which JSON must be able to write."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def build_cached(fill: Callable[[Path], Any], folder: Path) -> None:
    """Fill ``folder``, aside and renamed, so that an interrupted build is never read; nothing if it exists.

    Where several processes build at once, the first one's folder is taken, and the others throw theirs away.

    Raises:
        DataError: it cannot be written, or what ``fill`` raises.
    """
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(folder) as (aside,):
            aside.mkdir()
            fill(aside)
    except OSError as error:
        if folder.exists():  # another node was quicker
            return
        raise DataError(
            f"{error.filename or folder.parent}: the sample index cannot be written ({error.strerror}); "
            f"set {NAME.dataset.path_to_cache} to a folder that can be."
        ) from error


def map_array(path: str | Path) -> np.ndarray:
    """The array of a ``.npy`` file of a folder here, mapped: the ranks of a node share its memory.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete its folder, and it is made anew.") from error
