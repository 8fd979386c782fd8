"""Counts of a data source's documents, tokens and samples, and origins of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Contents:
    """Counts of one epoch of a source: a split's part of a file, or mock samples.

    Args:
        name: the file, as in ``dataset.data_path``.
        documents: in the part; ``None`` for mock samples of one length.
        all_documents: in the whole file.
        tokens: in the part's documents.
        loss_tokens: labels in the loss; ``None`` if counting them would need to read every token.
        samples: per epoch. A fraction if windows continue from one epoch into the next.
        ends: last token of each of the first documents; empty for files that this run tokenized.
    """

    name: str
    documents: int | None
    all_documents: int | None
    tokens: int
    loss_tokens: float | None
    samples: float
    ends: tuple[int, ...] = ()


class Origin(NamedTuple):
    """Place of a sample in its file.

    documents: numbers in the file ``name``, from 0. start: place of the sample's first token in the first document.
    """

    name: str
    documents: tuple[int, ...]
    start: int


class HasSources(Protocol):
    """Data set that reports its sources."""

    def sources(self) -> list[Contents]:
        """Return the contents of one epoch of each source."""

    def taken(self, count: int) -> Sequence[float]:
        """Return how many of the first ``count`` samples come from each source."""

    def origin(self, index: int) -> Origin:
        """Return the place of a sample in its file."""
