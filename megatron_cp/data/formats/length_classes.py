"""Index of a file's documents by length.

It is computed once, stored, and mapped by every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_cp.data.formats.cache import (
    build_cached,
    cache_key,
    cache_root,
    map_array,
    running_sums,
    store_array,
)
from megatron_cp.data.formats.documents import DocumentIndex
from megatron_cp.data.formats.indexed import IndexedFiles, chunks

_FORMAT = 1  # of the stored arrays; a change invalidates caches
_FIELDS = ("documents", "samples", "tokens")


@dataclass(frozen=True)
class LengthClass:
    """Documents of a file with lengths in a class: their numbers ascend, unsigned [n].

    samples, tokens: cumulative sums over them, unsigned [n + 1]. A split is a slice.
    """

    documents: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray  # of all samples


def classes_of(lengths: np.ndarray, bounds: Sequence[int]) -> list[LengthClass]:
    """Return the classes of documents that are one sample each, of these lengths."""
    found = []
    for number in range(len(bounds) + 1):
        documents = np.flatnonzero(np.searchsorted(bounds, lengths, side="right") == number)
        sums = np.append(0, np.cumsum(lengths[documents]))
        found.append(LengthClass(documents, np.arange(len(documents) + 1), sums))
    return found


def open_length_classes(
    files: IndexedFiles,
    index: DocumentIndex,
    max_length: int,
    bounds: Sequence[int],
    path_to_cache: str | None = None,
) -> list[LengthClass]:
    """Open the classes of documents between the lengths ``bounds``.

    Builds them if they do not exist. A document's length is the number of its targets, before it is cut into samples.
    Documents without targets are in no class.

    Raises:
        DataError: the folder cannot be written or read.
    """
    # The number of samples tells apart indices of the same files.
    of_index = [max_length, int(index.samples[-1]), list(bounds)]
    name = cache_key(_FORMAT, str(Path(files.prefix).absolute()), files.stamp, *of_index)
    folder = cache_root(path_to_cache, files.prefix) / f"lengths-{name}"

    def fill(partial: Path) -> None:
        for number in range(len(bounds) + 1):
            _store(index, max_length, bounds, number, partial)

    build_cached(fill, folder)
    return [
        LengthClass(*(map_array(folder / f"{field}-{number}.npy") for field in _FIELDS))
        for number in range(len(bounds) + 1)
    ]


def _store(index: DocumentIndex, max_length: int, bounds: Sequence[int], number: int, folder: Path) -> None:
    count = sum(len(documents) for documents, _, _ in _of_class(index, max_length, bounds, number))
    most = [len(index.samples), int(index.samples[-1]), int(index.targets[-1])]
    for place, (field, largest) in enumerate(zip(_FIELDS, most, strict=True)):
        parts = (part[place] for part in _of_class(index, max_length, bounds, number))
        path = folder / f"{field}-{number}.npy"
        if field == "documents":
            store_array(path, parts, count, largest)
        else:
            store_array(path, running_sums(parts), count + 1, largest)


def _of_class(
    index: DocumentIndex, max_length: int, bounds: Sequence[int], number: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield documents of a class, their samples and their tokens, in chunks."""
    for part in chunks(0, len(index.targets) - 1):
        targets, samples = (
            np.diff(each[part.start : part.stop + 1].astype(np.int64)) for each in (index.targets, index.samples)
        )
        found = np.flatnonzero((targets > 0) & (np.searchsorted(bounds, targets, side="right") == number))
        # Fewer than the targets if an index has one sample of a longer document.
        tokens = np.minimum(targets[found], samples[found] * max_length)
        yield part.start + found, samples[found], tokens
