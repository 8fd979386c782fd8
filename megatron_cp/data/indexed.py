"""Check a Megatron ``.bin``/``.idx`` pair before megatron-core maps it.

megatron-core trusts its files: a truncated one is read as garbage or ends the process. Here every fault has a message.

The index file, little-endian: magic (9 bytes), version (u64), dtype code (u8), number of sequences n (u64), number of
document boundaries d (u64), then lengths int32[n], byte offsets int64[n], boundaries int64[d] and, for multimodal data
only, modes int8[n].
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np

from megatron_cp.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Token dtypes by megatron-core's code. Floating point codes exist in the format but hold no tokens.
_DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@dataclass(frozen=True)
class IndexedFiles:
    """A checked pair: what its header says, and a stamp that changes when either file does."""

    prefix: str
    num_sequences: int
    num_boundaries: int  # of documents: one more than there are documents
    num_tokens: int
    dtype: type[np.integer]
    stamp: tuple[int, int, int]  # bytes of .bin, bytes of .idx, modification time of .idx in ns


def open_indexed(prefix: str) -> IndexedFiles:
    """Check the pair ``prefix.bin`` and ``prefix.idx``; ``prefix`` may also name one of the two files.

    Reads the header and the last entry only, so that every rank can afford it; see :func:`check_lengths`.

    Raises:
        DataError: a file is missing, empty, truncated, not an index, or the two do not belong together.
    """
    prefix = prefix.removesuffix(".bin").removesuffix(".idx")
    bin_path, idx_path = prefix + ".bin", prefix + ".idx"
    missing = [path for path in (bin_path, idx_path) if not os.path.isfile(path)]
    if missing:
        raise DataError(
            f"{' and '.join(missing)}: no such file. dataset.data_path names the two files without their endings; "
            "scripts/data/preprocess_data.py makes them from text."
        )
    try:
        with open(idx_path, "rb") as file:
            head = file.read(_HEADER.size)
            idx_stat = os.fstat(file.fileno())
        bin_bytes = os.stat(bin_path).st_size
        with open(bin_path, "rb"):
            pass
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    if not head:
        raise DataError(f"{idx_path}: is empty; make it again.")
    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        raise DataError(f"{idx_path}: is not a Megatron index (it does not start with {_MAGIC!r}).")
    if len(head) < _HEADER.size:
        raise DataError(f"{idx_path}: is truncated: {len(head)} bytes, its header alone has {_HEADER.size}.")
    _, version, code, count, boundaries = _HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{idx_path}: has index version {version}; only version 1 is known.")
    if code not in _DTYPES:
        raise DataError(f"{idx_path}: is corrupt: dtype code {code} is none of {sorted(_DTYPES)}.")
    needed = _HEADER.size + 12 * count + 8 * boundaries
    if idx_stat.st_size not in (needed, needed + count):
        what = "truncated" if idx_stat.st_size < needed else "corrupt"
        raise DataError(
            f"{idx_path}: is {what}: {idx_stat.st_size} bytes, but its header promises {needed} ({count} sequences)."
        )
    if count == 0 or bin_bytes == 0:
        raise DataError(f"{prefix}.bin and .idx: hold no tokens; preprocess a corpus that is not empty.")

    if boundaries < 2:
        raise DataError(f"{idx_path}: is corrupt: it has {boundaries} boundaries of documents, fewer than two.")

    dtype = _DTYPES[code]
    with open(idx_path, "rb") as file:
        file.seek(_HEADER.size + 4 * (count - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 4 * count + 8 * (count - 1))
        (offset,) = struct.unpack("<q", file.read(8))
    end = offset + length * np.dtype(dtype).itemsize
    if end != bin_bytes:
        what = "is truncated" if bin_bytes < end else "does not belong to its .idx"
        raise DataError(f"{bin_path}: {what}: {bin_bytes} bytes, but {idx_path} describes {end}.")
    stamp = (bin_bytes, idx_stat.st_size, idx_stat.st_mtime_ns)
    return IndexedFiles(prefix, count, boundaries, bin_bytes // np.dtype(dtype).itemsize, dtype, stamp)


def sequence_lengths(files: IndexedFiles) -> np.ndarray:
    """Tokens of each sequence, int32, mapped from the index."""
    return np.memmap(files.prefix + ".idx", dtype="<i4", mode="r", offset=_HEADER.size, shape=(files.num_sequences,))


def check_lengths(files: IndexedFiles) -> None:
    """Check all lengths and offsets of the index (reads the whole of it: one rank a node does).

    Raises:
        DataError: a length below zero, offsets that are not the running sum of the lengths, or boundaries of documents
            that do not run from the first sequence to the last.
    """
    path = files.prefix + ".idx"
    lengths = sequence_lengths(files)
    offsets = np.memmap(
        path, dtype="<i8", mode="r", offset=_HEADER.size + 4 * files.num_sequences, shape=(files.num_sequences,)
    )
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(files.dtype).itemsize
    if lengths.min() < 0 or offsets[0] != 0 or not np.array_equal(offsets[1:], ends[:-1]):
        raise DataError(f"{path}: is corrupt: its offsets are not the running sum of its lengths; make it again.")
    boundaries = np.memmap(
        path, dtype="<i8", mode="r", offset=_HEADER.size + 12 * files.num_sequences, shape=(files.num_boundaries,)
    )
    if boundaries[0] != 0 or boundaries[-1] != files.num_sequences or (np.diff(boundaries) < 0).any():
        raise DataError(
            f"{path}: is corrupt: its documents do not run from sequence 0 to {files.num_sequences}; make it again."
        )


def check_ids(path: str, smallest: int, largest: int, vocab_size: int | None) -> None:
    """Check the smallest and largest of some tokens of a file.

    Raises:
        DataError: the vocabulary does not have one of them.
    """
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        known = "0 and above" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise DataError(
            f"{path}: holds token {smallest if smallest < 0 else largest}, but the tokenizer's ids are {known}. "
            "If the files were made with another tokenizer, set tokenizer.tokenizer_model to that one."
        )
