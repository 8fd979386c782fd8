"""What a source of samples holds: counted from its index, so that nothing large is read for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Contents:
    """One epoch of a source: of the part of a file that a split takes, or of mock samples.

    Args:
        name: the file, as ``dataset.data_path`` names it.
        documents: of the part; ``None`` where there are none, as in mock samples of one length.
        all_documents: of the whole file.
        tokens: of the part's documents.
        loss_tokens: labels that count in the loss; ``None`` where only reading every token could tell.
        samples: that are dealt before any comes again. A fraction where windows run on from one epoch to the next.
        ends: the last token of each of the first documents; empty where this program tokenized them for the run.
    """

    name: str
    documents: int | None
    all_documents: int | None
    tokens: int
    loss_tokens: float | None
    samples: float
    ends: tuple[int, ...] = ()


class HasSources(Protocol):
    """A data set that can say what its samples come from."""

    def sources(self) -> list[Contents]:
        """One epoch of each source."""

    def taken(self, count: int) -> Sequence[float]:
        """How many of the first ``count`` samples come from each source."""
