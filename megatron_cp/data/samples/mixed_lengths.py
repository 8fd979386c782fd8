"""Draw documents by classes of length; each class of a file is a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.data.formats.length_classes import LengthClass
from megatron_cp.data.length_mixture import LengthMixture
from megatron_cp.data.samples.contents import Contents, Origin
from megatron_cp.data.samples.varlen import DocumentDataset, MockVarlenDataset, Sample

Whole = DocumentDataset | MockVarlenDataset


class DocumentsOfLength:
    """Samples of a source whose documents are in one class of length."""

    def __init__(self, source: Whole, found: LengthClass, lengths: str) -> None:
        """Use the source's part of the documents ``found``; ``lengths`` names the class."""
        self._source, self._found, self._lengths = source, found, lengths
        part = np.array(
            source.documents, dtype=found.documents.dtype
        )  # searchsorted copies the array for another dtype
        first, last = found.documents.searchsorted(part)
        self._documents, self.num_documents = slice(int(first), int(last)), int(last - first)
        self._before = int(found.samples[first])
        self._num_samples = int(found.samples[last]) - self._before
        self.num_tokens = int(found.tokens[last]) - int(found.tokens[first])

    def __len__(self) -> int:
        return self._num_samples

    def contents(self) -> Contents:
        """Return the counts of one epoch."""
        return replace(
            self._source.contents(),
            documents=self.num_documents,
            all_documents=len(self._found.documents),
            tokens=self.num_tokens,
            loss_tokens=self._source.loss_tokens_of(self._found.documents[self._documents]),
            samples=len(self),
            lengths=self._lengths,
        )

    def _places(self, indices: np.ndarray) -> np.ndarray:
        """Return the indices of samples in the whole source."""
        samples = self._before + indices
        places = self._found.samples.searchsorted(samples.astype(self._found.samples.dtype), side="right") - 1
        of_document = samples - self._found.samples[places].astype(np.int64)
        return self._source.first_samples(self._found.documents[places]) + of_document

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample, int64, in the shape of ``indices``."""
        return self._source.lengths(self._places(indices))

    def origin(self, index: int) -> Origin:
        """Return a sample's document, and its first token there."""
        return self._source.origin(int(self._places(np.asarray(index))))

    def __getitem__(self, index: int) -> Sample:
        return self._source[int(self._places(np.asarray(index)))]


def mixed(
    sources: Sequence[Whole],
    weights: Sequence[float] | None,
    classes: Sequence[Sequence[LengthClass]],
    mixture: LengthMixture,
) -> tuple[list[DocumentsOfLength], list[float]]:
    """Return a source for each class of each file, and their shares of tokens.

    A class has its share of the mixture. Within a class, files have the shares that they would have there without a
    mixture. Files without documents of a class are left out of it.

    Args:
        weights: the files' shares of tokens; by default their numbers of tokens.
        classes: of each source, one for each class of the mixture.

    Raises:
        DataError: a class has no documents.
    """
    per_token = [1.0] * len(sources)
    if weights is not None:
        per_token = [weight / source.num_tokens for weight, source in zip(weights, sources, strict=True)]
    parts = [
        [DocumentsOfLength(source, own[k], mixture.name(k)) for source, own in zip(sources, classes, strict=True)]
        for k in range(len(mixture.shares))
    ]
    found: list[DocumentsOfLength] = []
    shares: list[float] = []
    for k, (share, files) in enumerate(zip(mixture.shares, parts, strict=True)):
        natural = [part.num_tokens * each for part, each in zip(files, per_token, strict=True)]
        if not sum(natural):
            counts = [sum(part.num_documents for part in each) for each in parts]
            there = ", ".join(f"{mixture.name(i)}: {count:,}" for i, count in enumerate(counts))
            raise DataError(
                f"{NAME.dataset.length_mixture}: no document for training has {mixture.name(k)} ({there}). "
                f"Fix: {NAME.dataset.length_mixture}=null, or use other lengths"
            )
        found += [part for part in files if len(part)]
        shares += [share * each / sum(natural) for each in natural if each]
    return found, shares
