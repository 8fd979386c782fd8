"""Alter a real checkpoint's files, for tests that try what a disk or an attacker may do to it."""

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
    """An object whose unpickling runs a command of the shell, which leaves a marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def saved(value: Any, protocol: int = 2) -> bytes:
    content = io.BytesIO()
    torch.save(value, content, pickle_protocol=protocol)
    return content.getvalue()


def replace_object(folder: Path, name: str, content: bytes) -> None:
    """Have the index name other bytes for an object; the checksums are those of the altered files."""
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
        except (ValueError, OSError):  # an index that names no places: as an earlier version's, without checksums
            (folder / CHECKSUMS).unlink(missing_ok=True)


def as_written_before_checksums(folder: Path) -> None:
    """What the versions before them wrote."""
    common = read_common(folder)
    del common["checksums"]
    (folder / CHECKSUMS).unlink()
    replace_object(folder, "common_state", saved([common]))


def flip(path: Path, chosen: random.Random) -> tuple[int, int]:
    """Flip one bit of a file; returns where, for :func:`flip_back`."""
    place = chosen.randrange(path.stat().st_size), 1 << chosen.randrange(8)
    flip_back(path, *place)
    return place


def flip_back(path: Path, position: int, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))
