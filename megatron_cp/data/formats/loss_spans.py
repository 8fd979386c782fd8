"""Store which tokens of documents are in the loss.

The files stand beside a ``.bin``/``.idx`` pair. A document's spans are [begin, end) of its tokens, in order.
``PREFIX.spans.npy`` has those of all documents, int32 [spans, 2], and ``PREFIX.documents.npy`` the place of each
document's first span, int64 [documents + 1].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_cp.data.formats.cache import map_array

_SPANS, _DOCUMENTS = ".spans.npy", ".documents.npy"


@dataclass(frozen=True)
class LossSpans:
    """Mapped spans of a file; see the module."""

    spans: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    def mask(self, document: int, start: int, length: int) -> np.ndarray:
        """Return which tokens of a document are learned, 1 or 0: float32 [length].

        The tokens are [start, start + length).
        """
        mask = np.zeros(length, dtype=np.float32)
        for begin, end in self.spans[self.first[document] : self.first[document + 1]].tolist():
            mask[max(0, begin - start) : max(0, end - start)] = 1.0
        return mask

    def count(self, documents: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> int:
        """Count the learned tokens [begin, end) of documents; all arrays are int64 [n]."""
        numbers = self.first[documents + 1] - self.first[documents]
        # Places of the documents' spans, one after the other.
        skipped = self.first[documents] - np.cumsum(numbers) + numbers
        spans = self.spans[np.repeat(skipped, numbers) + np.arange(numbers.sum())].astype(np.int64)
        lower = np.maximum(spans[:, 0], np.repeat(begins, numbers))
        return int(np.maximum(np.minimum(spans[:, 1], np.repeat(ends, numbers)) - lower, 0).sum())


def write_spans(prefix: str, spans: Iterable[Iterable[tuple[int, int]]]) -> None:
    """Write the spans of each document."""
    found = [list(each) for each in spans]
    flat = [span for each in found for span in each]
    np.save(prefix + _SPANS, np.array(flat, dtype=np.int32).reshape(-1, 2))
    np.save(prefix + _DOCUMENTS, np.cumsum([0, *map(len, found)], dtype=np.int64))


def map_spans(prefix: str) -> LossSpans:
    """Map the spans of a pair; raise DataError if a file is missing or damaged."""
    return LossSpans(map_array(prefix + _SPANS), map_array(prefix + _DOCUMENTS))
