"""Which sample belongs to which document of a ``.bin/.idx`` pair: counted once, stored, and mapped by every rank.

What a rank would compute for itself is 24 bytes a document, on each rank of a node: too much for a billion documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_cp.data.formats.cache import build_cached, cache_key, cache_root, map_array
from megatron_cp.data.formats.indexed import IndexedFiles, check_lengths, chunks, document_lengths

_FORMAT = 1  # of the stored arrays; another number makes them anew
_TARGETS, _SAMPLES = "targets.npy", "samples.npy"


@dataclass(frozen=True)
class DocumentIndex:
    """Sums over the documents before each one of a file, and at last over all: unsigned, of one entry more than these.

    Any run of documents, such as the training part, is one of the index, too: nothing here depends on the parts.
    """

    targets: np.ndarray  # tokens to predict: all of a document but the first
    samples: np.ndarray  # pieces of at most max_length targets

    def documents_of(self, samples: np.ndarray) -> np.ndarray:
        """The documents of which these ``samples`` of the file are pieces: int64, of their shape."""
        numbers = samples.astype(self.samples.dtype)  # of another type they would have the whole array copied
        return self.samples.searchsorted(numbers, side="right") - 1

    def longest(self, first: int, last: int) -> tuple[int, int]:
        """The first of the longest documents from ``first`` to before ``last``, and its targets; (first, 0) of none."""
        document, most = first, 0
        for part in chunks(first, last):
            targets = np.diff(self.targets[part.start : part.stop + 1])
            if targets.max() > most:
                document, most = part.start + int(targets.argmax()), int(targets.max())
        return document, most


def open_documents(files: IndexedFiles, max_length: int, path_to_cache: str | None = None) -> DocumentIndex:
    """The index of documents that are cut into samples of at most ``max_length`` targets, one or more.

    It is made if it is not there, in a folder in ``path_to_cache`` (by default ``cache`` beside the files) whose name
    changes with the files and ``max_length``.

    Raises:
        DataError: the files are corrupt, or the folder cannot be written or read.
    """
    name = cache_key(_FORMAT, str(Path(files.prefix).absolute()), files.stamp, max_length)
    folder = cache_root(path_to_cache, files.prefix) / f"documents-{name}"
    build_cached(lambda aside: _store(files, max_length, aside), folder)
    return DocumentIndex(map_array(folder / _TARGETS), map_array(folder / _SAMPLES))


def _store(files: IndexedFiles, max_length: int, folder: Path) -> None:
    check_lengths(files)
    documents = files.num_boundaries - 1
    most_samples = files.num_tokens // max_length + documents
    _store_sums(folder / _TARGETS, _targets(files), documents, files.num_tokens)
    _store_sums(folder / _SAMPLES, (-(-part // max_length) for part in _targets(files)), documents, most_samples)


def _targets(files: IndexedFiles) -> Iterator[np.ndarray]:
    for part in chunks(0, files.num_boundaries - 1):
        yield np.maximum(document_lengths(files, part) - 1, 0)  # also where there is no token


def _store_sums(path: Path, parts: Iterable[np.ndarray], count: int, most: int) -> None:
    """Write 0 and the running sums of ``count`` numbers as the smallest integers that hold ``most``."""
    dtype = np.min_scalar_type(most)
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count + 1,)}
        np.lib.format.write_array_header_1_0(file, header)
        total = 0
        file.write(np.zeros(1, dtype).tobytes())
        for part in parts:
            sums = total + np.cumsum(part, dtype=np.int64)
            total = int(sums[-1])
            file.write(sums.astype(dtype).tobytes())
