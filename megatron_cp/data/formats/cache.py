"""Cache folders for arrays computed from data files.

A cached array is valid while path, size and modification time of the data file are unchanged. This check reads no
data, so every rank does it at every start.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
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


def store_array(path: Path, parts: Iterable[np.ndarray], count: int, most: int) -> None:
    """Write ``count`` numbers from 0 to ``most`` in the smallest dtype, part by part."""
    dtype = np.min_scalar_type(most)
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(part.astype(dtype).tobytes())


def running_sums(parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield 0 and then the cumulative sums of ``parts``, int64."""
    total = np.zeros(1, dtype=np.int64)
    yield total
    for part in parts:
        sums = total[-1] + np.cumsum(part, dtype=np.int64)
        yield sums
        total = sums if len(sums) else total


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
