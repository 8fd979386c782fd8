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
from megatron_cp.data.formats.indexed import chunks

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

    def count(self, first: int, last: int, begins: np.ndarray | int = 1, ends: np.ndarray | None = None) -> int:
        """Count the learned tokens of documents [first, last).

        ``begins`` and ``ends`` limit each document's tokens, int64 [last - first]. A document's token 0 has no
        prediction, so it does not count.
        """
        total = 0
        for part in chunks(first, last):
            numbers = np.diff(self.first[part.start : part.stop + 1])
            spans = self.spans[self.first[part.start] : self.first[part.stop]].astype(np.int64)
            of_part = slice(part.start - first, part.stop - first)
            lower = np.repeat(begins[of_part], numbers) if isinstance(begins, np.ndarray) else begins
            upper = spans[:, 1] if ends is None else np.minimum(spans[:, 1], np.repeat(ends[of_part], numbers))
            total += int(np.maximum(upper - np.maximum(spans[:, 0], lower), 0).sum())
        return total


def write_spans(prefix: str, spans: Iterable[Iterable[tuple[int, int]]]) -> None:
    """Write the spans of each document."""
    found = [list(each) for each in spans]
    flat = [span for each in found for span in each]
    np.save(prefix + _SPANS, np.array(flat, dtype=np.int32).reshape(-1, 2))
    np.save(prefix + _DOCUMENTS, np.cumsum([0, *map(len, found)], dtype=np.int64))


def map_spans(prefix: str) -> LossSpans:
    """Map the spans of a pair; raise DataError if a file is missing or damaged."""
    return LossSpans(map_array(prefix + _SPANS), map_array(prefix + _DOCUMENTS))
