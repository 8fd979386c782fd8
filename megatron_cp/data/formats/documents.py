"""Index from samples to documents of a ``.bin/.idx`` pair.

It is computed once, stored, and mapped by every rank. Computed by each rank, it would take 24 bytes a document and
rank: too much for a billion documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_cp.data.formats.cache import build_cached, cache_key, cache_root, map_array
from megatron_cp.data.formats.indexed import IndexedFiles, check_lengths, chunks, document_lengths

_FORMAT = 1  # of the stored arrays; a change invalidates caches
_TARGETS, _SAMPLES = "targets.npy", "samples.npy"


@dataclass(frozen=True)
class DocumentIndex:
    """Cumulative sums over the documents of a file: unsigned, [documents + 1].

    Entry i is the sum over the documents before document i. A split is a slice, so the index does not depend on it.
    """

    targets: np.ndarray  # tokens to predict: all tokens of a document but the first
    samples: np.ndarray  # of at most max_length targets each; one a document if longer ones are cut

    def documents_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the document of each sample: int64, in the shape of ``samples``."""
        numbers = samples.astype(self.samples.dtype)  # searchsorted would copy the whole array for another dtype
        return self.samples.searchsorted(numbers, side="right") - 1

    def longest(self, first: int, last: int) -> tuple[int, int]:
        """Return the first longest document in [first, last), and its targets.

        Returns (first, 0) if no document has targets.
        """
        document, most = first, 0
        for part in chunks(first, last):
            targets = np.diff(self.targets[part.start : part.stop + 1])
            if targets.max() > most:
                document, most = part.start + int(targets.argmax()), int(targets.max())
        return document, most


def open_documents(
    files: IndexedFiles, max_length: int, path_to_cache: str | None = None, *, one_sample: bool = False
) -> DocumentIndex:
    """Open the index from samples to documents.

    A sample has at most ``max_length`` targets; longer documents are split into several. ``one_sample``: a document is
    one sample, however long. Builds the index if it does not exist. Its folder is in ``path_to_cache`` (by default
    ``cache`` beside the files); the folder's name depends on the files and the length.

    Raises:
        DataError: the files are corrupt, or the folder cannot be written or read.
    """
    most = max(files.num_tokens, 1) if one_sample else max_length
    name = cache_key(_FORMAT, str(Path(files.prefix).absolute()), files.stamp, most)
    folder = cache_root(path_to_cache, files.prefix) / f"documents-{name}"
    build_cached(lambda partial: _store(files, most, partial), folder)
    return DocumentIndex(map_array(folder / _TARGETS), map_array(folder / _SAMPLES))


def _store(files: IndexedFiles, max_length: int, folder: Path) -> None:
    check_lengths(files)
    documents = files.num_boundaries - 1
    most_samples = files.num_tokens // max_length + documents
    _store_sums(folder / _TARGETS, _targets(files), documents, files.num_tokens)
    _store_sums(folder / _SAMPLES, (-(-part // max_length) for part in _targets(files)), documents, most_samples)


def _targets(files: IndexedFiles) -> Iterator[np.ndarray]:
    for part in chunks(0, files.num_boundaries - 1):
        yield np.maximum(document_lengths(files, part) - 1, 0)  # 0, not -1, for an empty document


def _store_sums(path: Path, parts: Iterable[np.ndarray], count: int, most: int) -> None:
    """Write cumulative sums of ``count`` numbers in the smallest dtype for ``most``."""
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
