"""Check a Megatron ``.bin``/``.idx`` pair before megatron-core maps it.

megatron-core does no such checks: it reads garbage from a truncated file, or the process ends.

The index file, little-endian: magic (9 bytes), version (u64), dtype code (u8), number of sequences n (u64), number of
document boundaries d (u64), then lengths int32[n], byte offsets int64[n], boundaries int64[d] and, for multimodal data
only, modes int8[n].
"""

from __future__ import annotations

import difflib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Token dtypes by megatron-core's code. Floating point codes exist in the format but hold no tokens.
_DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_REMAKE = "Fix: make the files again with megatron-cp preprocess"
_CHUNK = 1 << 20  # entries of an index per array: limits the memory for a billion entries


@dataclass(frozen=True)
class IndexedFiles:
    """Header of a checked ``.bin/.idx`` pair, and a stamp that changes with the files."""

    prefix: str
    num_sequences: int
    num_boundaries: int  # number of documents + 1
    num_tokens: int
    dtype: type[np.integer]
    stamp: tuple[int, int, int]  # bytes of .bin, bytes of .idx, modification time of .idx in ns


def _nearest_pair(prefix: str) -> str:
    """Return the setting with the nearest pair in the folder of a missing one."""
    folder = Path(prefix).parent
    pairs = [str(path.with_suffix("")) for path in folder.glob("*.idx")] if os.path.isdir(folder) else []
    nearest = difflib.get_close_matches(prefix, pairs, n=1)
    return (
        f"{NAME.dataset.data_path}={nearest[0] if nearest else 'PREFIX'} (of a .bin/.idx pair from "
        "megatron-cp preprocess)"
    )


def open_indexed(prefix: str) -> IndexedFiles:
    """Check the pair ``prefix.bin`` and ``prefix.idx``.

    ``prefix`` may also be the name of one of the two files. Reads only the header and the last entry, so every rank
    calls it; :func:`check_lengths` reads all.

    Raises:
        DataError: a file is missing, empty, truncated or not an index, or the two files do not match.
    """
    prefix = prefix.removesuffix(".bin").removesuffix(".idx")
    bin_path, idx_path = prefix + ".bin", prefix + ".idx"
    missing = [path for path in (bin_path, idx_path) if not os.path.isfile(path)]
    if missing:
        raise DataError(f"{' and '.join(missing)}: no such file. Fix: {_nearest_pair(prefix)}")
    try:
        with open(idx_path, "rb") as file:
            head = file.read(_HEADER.size)
            idx_stat = os.fstat(file.fileno())
        with open(bin_path, "rb") as file:
            bin_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    if not head:
        raise DataError(f"{idx_path}: is empty. {_REMAKE}")
    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        raise DataError(f"{idx_path}: is not a Megatron index: it does not start with {_MAGIC!r}. {_REMAKE}")
    if len(head) < _HEADER.size:
        raise DataError(
            f"{idx_path}: is truncated: it has {len(head)} bytes, the header alone has {_HEADER.size}. {_REMAKE}"
        )
    _, version, code, count, boundaries = _HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{idx_path}: has index version {version}; only version 1 is supported. {_REMAKE}")
    if code not in _DTYPES:
        raise DataError(f"{idx_path}: is corrupt: dtype code {code} is not one of {sorted(_DTYPES)}. {_REMAKE}")
    needed = _HEADER.size + 12 * count + 8 * boundaries
    if idx_stat.st_size not in (needed, needed + count):
        what = "truncated" if idx_stat.st_size < needed else "corrupt"
        raise DataError(
            f"{idx_path}: is {what}: it has {idx_stat.st_size} bytes, the header describes {needed} ({count} "
            f"sequences). {_REMAKE}"
        )
    if count == 0 or bin_bytes == 0:
        raise DataError(f"{prefix}.bin and .idx: hold no tokens. Fix: preprocess a corpus that is not empty")

    if boundaries < 2:
        raise DataError(f"{idx_path}: is corrupt: it has {boundaries} document boundaries, fewer than two. {_REMAKE}")

    dtype = _DTYPES[code]
    size = np.dtype(dtype).itemsize
    stamp = (bin_bytes, idx_stat.st_size, idx_stat.st_mtime_ns)
    files = IndexedFiles(prefix, count, boundaries, bin_bytes // size, dtype, stamp)
    end = int(_offsets(files)[-1]) + int(sequence_lengths(files)[-1]) * size
    if end != bin_bytes:
        what = "is truncated" if bin_bytes < end else "does not match its .idx"
        raise DataError(f"{bin_path}: {what}: it has {bin_bytes} bytes, {idx_path} describes {end}. {_REMAKE}")
    return files


def chunks(first: int, stop: int) -> Iterator[slice]:
    """Yield slices of at most ``_CHUNK`` entries from ``first`` to ``stop``."""
    return (slice(start, min(start + _CHUNK, stop)) for start in range(first, stop, _CHUNK))


def sequence_lengths(files: IndexedFiles) -> np.ndarray:
    """Map the tokens of each sequence, int32, from the index."""
    return _mapped(files, "<i4", 0, files.num_sequences)


def document_lengths(files: IndexedFiles, part: slice) -> np.ndarray:
    """Return the tokens of each document of ``part``, int64.

    A document is the contiguous sequences between two boundaries. Call :func:`check_lengths` first.
    """
    return np.diff(tokens_before(files, _boundaries(files)[part.start : part.stop + 1]))


def tokens_before(files: IndexedFiles, sequences: np.ndarray) -> np.ndarray:
    """Return the tokens before each sequence, int64; call :func:`check_lengths` first.

    Sequence number ``num_sequences`` gives the number of all tokens.
    """
    begins = _offsets(files)[np.minimum(sequences, files.num_sequences - 1)] // np.dtype(files.dtype).itemsize
    return np.where(sequences < files.num_sequences, begins, files.num_tokens)


def tokens_between(files: IndexedFiles, first: int, last: int) -> int:
    """Return the tokens of documents [first, last); call :func:`check_lengths` first."""
    begin, end = tokens_before(files, _boundaries(files)[[first, last]])
    return int(end - begin)


def first_end_tokens(files: IndexedFiles) -> tuple[int, ...]:
    """Return the last token of each of the first eight documents, without empty ones.

    Call :func:`check_lengths` first.
    """
    begins = tokens_before(files, _boundaries(files)[:9])
    tokens = np.memmap(files.prefix + ".bin", dtype=files.dtype, mode="r")
    return tuple(int(tokens[end - 1]) for begin, end in pairwise(begins) if end > begin)


def check_lengths(files: IndexedFiles) -> None:
    """Check all lengths, offsets and boundaries of the index.

    Reads the whole index; one rank calls it before the first use.

    Raises:
        DataError: a length is negative, the offsets are not the cumulative sums of the lengths, or the document
            boundaries do not rise from the first sequence to the last.
    """
    path = files.prefix + ".idx"
    lengths, offsets, boundaries = sequence_lengths(files), _offsets(files), _boundaries(files)
    end = 0
    for part in chunks(0, files.num_sequences):
        sizes = lengths[part].astype(np.int64) * np.dtype(files.dtype).itemsize
        ends = end + np.cumsum(sizes)
        if sizes.min() < 0 or not np.array_equal(offsets[part], ends - sizes):
            raise DataError(f"{path}: is corrupt: its offsets are not the running sum of its lengths. {_REMAKE}")
        end = int(ends[-1])
    falls = any(
        (np.diff(boundaries[part.start : part.stop + 1]) < 0).any() for part in chunks(0, files.num_boundaries - 1)
    )
    if boundaries[0] != 0 or boundaries[-1] != files.num_sequences or falls:
        raise DataError(
            f"{path}: is corrupt: its documents do not run from sequence 0 to {files.num_sequences}. {_REMAKE}"
        )


def _offsets(files: IndexedFiles) -> np.ndarray:
    """Map the bytes before each sequence, int64."""
    return _mapped(files, "<i8", 4 * files.num_sequences, files.num_sequences)


def _boundaries(files: IndexedFiles) -> np.ndarray:
    """Map the first sequence of each document, then the number of sequences, int64."""
    return _mapped(files, "<i8", 12 * files.num_sequences, files.num_boundaries)


def _mapped(files: IndexedFiles, dtype: str, offset: int, count: int) -> np.ndarray:
    return np.memmap(files.prefix + ".idx", dtype=dtype, mode="r", offset=_HEADER.size + offset, shape=(count,))


def check_ids(path: str, smallest: int, largest: int, vocab_size: int | None) -> None:
    """Check the smallest and the largest token id against the vocabulary.

    Raises:
        DataError: one of them is not in the vocabulary.
    """
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        known = "0 and above" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise DataError(
            f"{path}: has token {smallest if smallest < 0 else largest}, but the tokenizer's ids are {known}. Fix: "
            f"{NAME.tokenizer.tokenizer_type}=HuggingFaceTokenizer {NAME.tokenizer.tokenizer_model}=PATH (of these "
            f"files), or {NAME.tokenizer.tokenizer_type}=NullTokenizer "
            f"{NAME.tokenizer.vocab_size}={max(0, largest) + 1}"
        )
