"""Alter the files of a real checkpoint, to test damaged and malicious checkpoints."""

from __future__ import annotations

import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_cp.mcore.checkpoint_index import INDEX, read_index
from megatron_cp.training.checkpoint.checksums import CHECKSUMS, write_checksums
from megatron_cp.training.checkpoint.content import read_common


class Command:
    """Object whose unpickling runs a shell command, which creates a marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def saved(value: Any, protocol: int = 2) -> bytes:
    content = io.BytesIO()
    torch.save(value, content, pickle_protocol=protocol)
    return content.getvalue()


def replace_object(folder: Path, name: str, content: bytes) -> None:
    """Make the index list other bytes for an object.

    Updates the checksums of altered files.
    """
    index = read_index(folder)
    for key in index.storage_data:
        if key.fqn.startswith(f"{name}/"):
            index.storage_data[key] = _StorageInfo("__9_0.distcp", 0, len(content))
    (folder / "__9_0.distcp").write_bytes(content)
    replace_index(folder, pickle.dumps(index))


def replace_index(folder: Path, content: bytes) -> None:
    (folder / INDEX).write_bytes(content)
    renew_checksums(folder)


def renew_checksums(folder: Path) -> None:
    if (folder / CHECKSUMS).exists():
        (folder / CHECKSUMS).unlink()
        try:
            write_checksums(folder, {})
        except (ValueError, OSError):  # an index without places, as versions without checksums wrote it
            (folder / CHECKSUMS).unlink(missing_ok=True)


def as_written_before_checksums(folder: Path) -> None:
    """Remove what versions without checksums did not write."""
    common = read_common(folder)
    del common["checksums"]
    (folder / CHECKSUMS).unlink()
    replace_object(folder, "common_state", saved([common]))


def flip(path: Path, chosen: random.Random) -> tuple[int, int]:
    """Flip one bit of a file; return its place, for :func:`flip_back`."""
    place = chosen.randrange(path.stat().st_size), 1 << chosen.randrange(8)
    flip_back(path, *place)
    return place


def flip_back(path: Path, position: int, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))
