"""Write a file so that its readers find the old text or the new one, whenever the writer dies."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str, *, survives_power_loss: bool = False) -> None:
    """Replace a file's text; one process at a time writes to a ``path``.

    Args:
        survives_power_loss: wait until the file and its name are on the disk.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    if survives_power_loss:
        to_disk(aside)
    os.replace(aside, path)
    if survives_power_loss:
        to_disk(path.parent)


def to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
