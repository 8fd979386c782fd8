"""Paths and names of an evaluation. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.common.errors import DataError
from megatron_cp.data.formats.rows import LINES, PARQUET
from megatron_cp.data.text.text_files import search

_IN_FOLDERS = (".txt", *LINES, PARQUET)


def find_files(given: Sequence[str]) -> list[str]:
    """Return the files of paths; folders are searched.

    A ``.bin``/``.idx`` pair is named by its prefix.

    Raises:
        DataError: a path does not exist, or a folder has no file to read.
    """
    found = []
    for path in given:
        prefix = path.removesuffix(".bin").removesuffix(".idx")
        if os.path.isfile(prefix + ".idx"):
            found.append(prefix)
        else:
            found += map(str, search([path], _IN_FOLDERS)[0])
    return list(dict.fromkeys(found))


def is_indexed(path: str) -> bool:
    """Return whether a path of :func:`find_files` is the prefix of a pair."""
    return os.path.isfile(path + ".idx")


def describe(path: str) -> dict[str, object]:
    """Return the path, bytes and modification time of a file."""
    status = os.stat(path + ".bin" if is_indexed(path) else path)
    return {"path": str(Path(path).absolute()), "file_bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def name_of(paths: Sequence[str], seq_length: int) -> str:
    """Return the default name of an evaluation."""
    first = Path(paths[0]).name.removesuffix(Path(paths[0]).suffix) or "data"
    more = f"-and-{len(paths) - 1}-more" if len(paths) > 1 else ""
    return f"{first}{more}-{seq_length}"


def check_name(name: str) -> None:
    """Raise DataError if an evaluation's name is no plain file name."""
    if not name or Path(name).name != name or name.startswith("."):
        raise DataError(f"--name {name}: must be a file name without folders. Fix: --name my_evaluation")
