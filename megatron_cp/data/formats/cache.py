"""Cache folders for arrays computed from data files.

A cached array is valid while path, size and modification time of the data file are unchanged. This check reads no
data, so every rank does it at every start.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.common.atomic_files import atomic_write
from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME


def cache_root(path_to_cache: str | None, data_file: str | Path) -> Path:
    """Return ``path_to_cache``, by default the folder ``cache`` beside ``data_file``."""
    return Path(path_to_cache) if path_to_cache else Path(data_file).absolute().parent / "cache"


def cache_key(*parts: Any) -> str:
    """Return a hash of 16 characters of ``parts``, which must be JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def build_cached(fill: Callable[[Path], Any], folder: Path) -> None:
    """Fill a temporary folder and rename it to ``folder``; do nothing if it exists.

    If several processes build at once, the first folder is kept and the others are removed.

    Raises:
        DataError: the folder cannot be written. Errors of ``fill`` are passed on.
    """
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder) as (partial,):
            partial.mkdir()
            fill(partial)
    except OSError as error:
        if folder.exists():  # another node finished first
            return
        raise DataError(
            f"{error.filename or folder.parent}: the sample index cannot be written ({error.strerror}). "
            f"Fix: {NAME.dataset.path_to_cache}=FOLDER (a writable one)"
        ) from error


def map_array(path: str | Path) -> np.ndarray:
    """Map the array of a ``.npy`` file; the ranks of a node share its memory.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Fix: rm -r {shlex.quote(str(Path(path).parent))} (it is built again)"
        ) from error
