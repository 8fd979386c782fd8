"""Every sample of several sources once, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_cp.dynamic_cp.runtime.packing import Sample, dummy_sample


class CountedSource(Protocol):
    """Samples of documents; a long document may have several."""

    @property
    def num_documents(self) -> int: ...

    def __len__(self) -> int: ...

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of samples: int64 [n] of int64 [n]."""

    def documents_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the documents of samples, from 0: int64 [n] of int64 [n]."""

    def __getitem__(self, index: int) -> Sample: ...


class EverySample:
    """Source for packing: all samples of ``sources`` once, then samples without loss.

    The latter fill the last global batch. Documents are numbered over all sources.
    """

    def __init__(self, sources: Sequence[CountedSource]) -> None:
        self._sources = list(sources)
        self._first = np.cumsum([0, *map(len, sources)])
        self.first_documents = np.cumsum([0, *(source.num_documents for source in sources)])

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    def _by_source(self, indices: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return (source, places in ``indices``) of the samples that exist."""
        numbers = np.searchsorted(self._first, indices, side="right") - 1
        return [(k, np.flatnonzero(numbers == k)) for k in np.unique(numbers).tolist() if k < len(self._sources)]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample, int64 [n]."""
        found = np.full(len(indices), len(dummy_sample()["tokens"]), dtype=np.int64)
        for k, places in self._by_source(indices):
            found[places] = self._sources[k].lengths(indices[places] - self._first[k])
        return found

    def documents_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the document of each sample, int64 [n]; 0 for those without loss."""
        found = np.zeros(len(indices), dtype=np.int64)
        for k, places in self._by_source(indices):
            found[places] = self.first_documents[k] + self._sources[k].documents_of(indices[places] - self._first[k])
        return found

    def __getitem__(self, index: int) -> Sample:
        if index >= len(self):
            return dummy_sample()
        k = int(np.searchsorted(self._first, index, side="right")) - 1
        return self._sources[k][int(index - self._first[k])]
