"""Checksums of checkpoint files: computed on write, stored, and verified on read.

They detect damage by a disk, a network or a copy. They do not authenticate: anyone who can write a checkpoint can write
matching checksums. xxh3 with 128 bits is faster than memory, see ``benchmarks/checkpoint_checksums.py``.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from xxhash import xxh3_128

from megatron_cp.common.errors import UnusableCheckpoint
from megatron_cp.common.input_files import file_or_pipe, parse_json, read_bytes
from megatron_cp.mcore.checkpoint_index import INDEX, read_index
from megatron_cp.mcore.checkpoint_reader import COMMON_FILE

CHECKSUMS = "checksums.json"
_COMMON = "common_state/shard_0_1"  # megatron-core's name for non-tensor state
_CONFIG = "metadata.json"  # written by megatron-core, holds the format
_READERS = 4  # files that a rank reads at once
_BLOCK = 1 << 20  # fits the processor's cache


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of a file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Checksums:
    """Checksums of a checkpoint.

    files: by file name. common: of the common state, which is read before the files are verified.
    """

    files: Mapping[str, FileSum]
    common: str


class SummingTransforms(_StorageWriterTransforms):
    """A stream that torch writes a file through, and that sums all bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._stream: Any = None  # the file
        self._sum = xxh3_128()
        self._bytes = 0

    def transform_save_stream(self, write_item: Any, raw_stream: io.IOBase) -> tuple[IO[bytes], list[str]]:
        self._stream = raw_stream
        return super().transform_save_stream(write_item, self)  # type: ignore[arg-type]

    def write(self, content: Any) -> int:
        self._sum.update(content)
        self._bytes += memoryview(content).nbytes
        return self._stream.write(content)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def result(self) -> FileSum:
        return FileSum(self._bytes, self._sum.hexdigest())


def write_checksums(folder: Path, files: Mapping[str, FileSum]) -> None:
    """Write the checksums of an otherwise complete checkpoint, on rank 0.

    Args:
        files: of the data files, from the ranks that wrote them. The other files are small and read here.
    """
    rest = {path.name: sum_of(path) for path in folder.iterdir() if path.name not in files}
    place = read_index(folder).storage_data
    common = next(_bytes_at(folder, where) for key, where in place.items() if key.fqn == _COMMON)
    sums = Checksums(dict(sorted((rest | dict(files)).items())), xxh3_128(common).hexdigest())
    (folder / CHECKSUMS).write_text(_serialized(sums), encoding="ascii")


def _serialized(sums: Checksums) -> str:
    content = asdict(sums)
    return json.dumps(content | {"xxh3_128": xxh3_128(json.dumps(content).encode()).hexdigest()}, indent=1)


def read_checksums(folder: Path) -> Checksums | None:
    """Return a checkpoint's checksums, ``None`` if an earlier version wrote it.

    Raises:
        UnusableCheckpoint: the checksum file is damaged.
    """
    path = folder / CHECKSUMS
    try:
        text = read_bytes(path).decode("ascii")
        content = parse_json(text)
        files = {
            str(name): FileSum(int(each["bytes"]), str(each["xxh3_128"])) for name, each in content["files"].items()
        }
        sums = Checksums(files, str(content["common"]))
        if _serialized(sums) == text:
            return sums
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UnusableCheckpoint(f"{path} is damaged: the stored checksum does not match the contents")


def changed_files(folder: Path, sums: Checksums, rank: int = 0, ranks: int = 1) -> list[str]:
    """Verify this rank's share of the files; all ranks cover each file once."""
    # Sort by size, so that all ranks read about as many bytes.
    names = sorted(sums.files, key=lambda name: (-sums.files[name].bytes, name))[rank::ranks]
    with ThreadPoolExecutor(_READERS) as readers:  # reading and hashing release the GIL
        problems = readers.map(lambda name: _problem_of(folder / name, sums.files[name]), names)
        found = [f"{folder / name} {problem}" for name, problem in zip(names, problems, strict=True) if problem]
    if rank == 0 and COMMON_FILE not in sums.files and (folder / COMMON_FILE).exists():
        found.append(f"{folder / COMMON_FILE} does not belong to this checkpoint; delete it")
    return found


def _problem_of(path: Path, expected: FileSum) -> str:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"has {size} bytes, expected {expected.bytes}"
        return "" if sum_of(path) == expected else "is corrupted (checksum mismatch)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def sum_of(path: Path) -> FileSum:
    """Read a file and return size and checksum."""
    total, size, block = xxh3_128(), 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            total.update(block[:count])
            size += count
    return FileSum(size, total.hexdigest())


def read_common_bytes(folder: Path, sums: Checksums | None) -> bytes:
    """Return the serialized common state after verifying the files that locate it.

    Raises:
        UnusableCheckpoint: the state is damaged or missing.
        OSError: a file cannot be read.
    """
    files = {} if sums is None else sums.files
    for name in files.keys() & {INDEX, _CONFIG}:
        problem = _problem_of(folder / name, files[name])
        if problem:
            raise UnusableCheckpoint(f"{folder / name} {problem}")
    for key, place in read_index(folder).storage_data.items():
        if key.fqn == _COMMON:
            content = _bytes_at(folder, place)
            if sums is not None and xxh3_128(content).hexdigest() != sums.common:
                raise UnusableCheckpoint(f"{folder / place.relative_path} is corrupted (checksum mismatch)")
            return content
    raise UnusableCheckpoint(f"{folder / INDEX} has no entry {_COMMON}: another program wrote this checkpoint")


def _bytes_at(folder: Path, place: Any) -> bytes:
    with open(folder / place.relative_path, "rb", opener=file_or_pipe) as file:
        file.seek(place.offset)
        return file.read(min(place.length, os.fstat(file.fileno()).st_size))
