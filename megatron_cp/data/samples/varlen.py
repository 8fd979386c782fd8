"""Variable-length samples: one per document.

For a document of tokens d[0..n] the sample has ``tokens`` d[0..n-1], ``labels`` d[1..n] and a loss mask. The mask is 1
for labels to learn, else 0. No token predicts the next document. Lengths are read from the index, not from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.data.formats.documents import open_documents
from megatron_cp.data.formats.indexed import check_ids, chunks, first_end_tokens, open_indexed, tokens_between
from megatron_cp.data.formats.length_classes import LengthClass, classes_of, open_length_classes
from megatron_cp.data.formats.loss_spans import LossSpans
from megatron_cp.data.samples.contents import Contents, Origin
from megatron_cp.data.split import ALL_FOR_TRAINING

Sample = dict[str, torch.Tensor]


class MockVarlenDataset:
    """Random tokens that depend on (seed, index) only, of given lengths.

    Args:
        lengths: tokens of each sample, each at least 1.
        masked_fraction: average share of zeros in a loss mask, below 1. The zeros are at the sample's start.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, vocab_size: int, seed: int, masked_fraction: float = 0.0
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if self._lengths.size == 0 or int(self._lengths.min()) < 1:
            raise DataError("needs at least one length, and lengths of 1 or more. Fix: remove shorter lengths")
        self._vocab_size, self._seed, self._masked = vocab_size, seed, masked_fraction
        self.num_tokens = int(self._lengths.sum())

    def __len__(self) -> int:
        return len(self._lengths)

    def contents(self) -> Contents:
        """Return the counts of one epoch, with the expected number of loss tokens."""
        tokens, most = self.num_tokens, 2 * self._masked  # a sample's masked share is uniform in [0, most], cut to 1
        masked = most / 2 if most <= 1 else 1 - 1 / (2 * most)
        return Contents("", len(self), len(self), tokens, tokens * (1 - masked), len(self))

    @property
    def documents(self) -> tuple[int, int]:
        """First and last + 1 of the documents, which are the samples."""
        return 0, len(self)

    @property
    def num_documents(self) -> int:
        return len(self)

    def documents_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the document of each sample: the sample itself."""
        return indices

    def length_classes(self, bounds: Sequence[int]) -> list[LengthClass]:
        """Return the classes of samples between the lengths ``bounds``."""
        return classes_of(self._lengths, bounds)

    def first_samples(self, documents: np.ndarray) -> np.ndarray:
        """Return the first sample of each document."""
        return documents

    def loss_tokens_of(self, documents: np.ndarray) -> float:
        """Return the expected number of loss tokens of documents."""
        return float(self._lengths[documents].sum()) * (self.contents().loss_tokens or 0) / self.num_tokens

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample, int64, in the shape of ``indices``."""
        return self._lengths[indices]

    def origin(self, index: int) -> Origin:
        """Return the number of a sample."""
        return Origin("", (index,), 0)

    def __getitem__(self, index: int) -> Sample:
        length = int(self._lengths[index])
        rng = np.random.default_rng((self._seed, index))
        text = torch.from_numpy(rng.integers(0, self._vocab_size, length + 1, dtype=np.int64))
        loss_mask = torch.ones(length)
        loss_mask[: int(rng.uniform(0, 2 * self._masked) * length)] = 0.0
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": loss_mask}


class DocumentDataset:
    """Documents of a Megatron ``.bin``/``.idx`` pair, one sample each.

    Args:
        prefix: path of the two files without their endings.
        max_length: largest number of tokens of a sample.
        too_long: what is done with longer documents. ``split`` makes samples of at most ``max_length`` of them,
            ``keep_start`` and ``keep_end`` one sample of their first or last tokens; ``refuse`` raises an error.
        part: (begin, end) of the documents to use, as shares of the file in [0, 1].
        spans: tokens of each document in the loss; by default all.
        rows: row of each document in the file ``name``, for messages.
        vocab_size: token ids must be below it.
        path_to_cache: folder of the document index, built if it does not exist; by default ``cache`` beside the files.
        name: name of the files in messages; by default ``prefix``.

    Documents of fewer than two tokens have nothing to predict and are skipped.

    Raises:
        DataError: the files are unusable, no document has two tokens, one is too long, or the index cannot be written.
            Reading a sample raises it for a token that is not in the vocabulary.
    """

    def __init__(
        self,
        prefix: str,
        max_length: int,
        too_long: Literal["split", "keep_start", "keep_end", "refuse"] = "split",
        *,
        part: tuple[float, float] = (0.0, 1.0),
        spans: LossSpans | None = None,
        rows: np.ndarray | None = None,
        vocab_size: int | None = None,
        path_to_cache: str | None = None,
        name: str | None = None,
    ) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        files = self._files = open_indexed(prefix)
        self._path, self._vocab_size, self._max_length = name or files.prefix, vocab_size, max_length
        self._too_long, self._path_to_cache = too_long, path_to_cache
        self._index = open_documents(files, max_length, path_to_cache, one_sample=self._cuts)
        self._data = IndexedDataset(files.prefix)
        total = files.num_boundaries - 1
        if spans is not None and len(spans) != total:
            raise DataError(
                f"{self._path}: has {total} documents but {len(spans)} lists of spans. Fix: delete the cache"
            )
        self._spans = spans
        first, last = self._part = tuple(round(share * total) for share in part)
        if too_long == "refuse":
            worst, targets = self._index.longest(first, last)
            if targets > max_length:
                place = f"{self._path}: document {worst}" if rows is None else f"{self._path}:{rows[worst]}: the sample"
                raise DataError(
                    f"{place} has {targets + 1} tokens, more than {max_length} + 1. Fix: "
                    f"{NAME.dataset.too_long}=split, or {NAME.dataset.too_long}=keep_end, or "
                    f"{NAME.dataset.seq_length}={targets}"
                )
        self._before = int(self._index.samples[first])
        self._num_samples = int(self._index.samples[last]) - self._before
        self.cut_documents, self.cut_tokens = self._count_cut() if self._cuts else (0, 0)
        targets = int(self._index.targets[last]) - int(self._index.targets[first])
        self.num_tokens = targets - self.cut_tokens  # of all samples
        if not len(self):
            if first == last and total:
                raise DataError(
                    f"{self._path}: has none of its {total} documents in this part. Fix: {ALL_FOR_TRAINING}"
                )
            where = "no document" if part == (0.0, 1.0) else f"none of the documents {first} to {last - 1} of {total}"
            raise DataError(f"{self._path}: {where} has two tokens or more. Fix: use longer documents")

    def __len__(self) -> int:
        return self._num_samples

    @property
    def documents(self) -> tuple[int, int]:
        """First and last + 1 of the documents in use."""
        first, last = self._part
        return first, last

    @property
    def num_documents(self) -> int:
        """Documents in use, with those that have no sample."""
        first, last = self._part
        return last - first

    def documents_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the document of each sample among those in use, int64."""
        return self._locate(indices)[0] - self._part[0]

    def length_classes(self, bounds: Sequence[int]) -> list[LengthClass]:
        """Return the classes of the file's documents between the lengths ``bounds``."""
        return open_length_classes(self._files, self._index, self._max_length, bounds, self._path_to_cache)

    def first_samples(self, documents: np.ndarray) -> np.ndarray:
        """Return the first sample of each document, int64."""
        return self._index.samples[documents].astype(np.int64) - self._before

    def loss_tokens_of(self, documents: np.ndarray) -> int:
        """Count the labels of documents in the loss; reads their spans."""
        return sum(self._loss_tokens(documents[piece].astype(np.int64)) for piece in chunks(0, len(documents)))

    def _loss_tokens(self, documents: np.ndarray) -> int:
        """Count the labels of a few documents in the loss, int64 [n]."""
        first, end = (self._index.targets[documents + i].astype(np.int64) for i in range(2))
        kept = np.minimum(end - first, self._max_length) if self._cuts else end - first
        if self._spans is None:
            return int(kept.sum())
        left_out = end - first - kept if self._too_long == "keep_end" else np.zeros_like(kept)
        begins = 1 + left_out  # token 0 has no prediction
        return self._spans.count(documents, begins, begins + kept)

    @property
    def _cuts(self) -> bool:
        return self._too_long in ("keep_start", "keep_end")

    def _count_cut(self) -> tuple[int, int]:
        """Return how many documents are cut, and the tokens cut from them."""
        documents = tokens = 0
        for part in chunks(*self._part):
            over = np.diff(self._index.targets[part.start : part.stop + 1].astype(np.int64)) - self._max_length
            documents += int((over > 0).sum())
            tokens += int(np.maximum(over, 0).sum())
        return documents, tokens

    def contents(self) -> Contents:
        """Return the counts of one epoch; reads the spans of all documents."""
        first, last = self._part
        ends = first_end_tokens(self._files) if self._spans is None else ()
        tokens, of_file = tokens_between(self._files, first, last), self._files.num_boundaries - 1
        counted = sum(self._loss_tokens(np.arange(piece.start, piece.stop)) for piece in chunks(first, last))
        return Contents(self._path, last - first, of_file, tokens, counted, len(self), ends)

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (document, first token within it, number of tokens) of each sample."""
        outside = (indices < 0) | (indices >= len(self))
        if outside.any():
            raise IndexError(f"sample {indices[outside][0]} of {len(self)}")
        samples = self._before + indices
        documents = self._index.documents_of(samples)
        # Convert only the requested entries of the unsigned index: a copy of all would be too large.
        starts = (samples - self._index.samples[documents].astype(np.int64)) * self._max_length
        first, end = (self._index.targets[documents + i].astype(np.int64) for i in range(2))
        lengths = np.minimum(end - first - starts, self._max_length)
        return documents, end - first - lengths if self._too_long == "keep_end" else starts, lengths

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample, int64, in the shape of ``indices``."""
        return self._locate(indices)[2]

    def origin(self, index: int) -> Origin:
        """Return a sample's document, and its first token there."""
        document, start, _ = map(int, self._locate(np.asarray(index)))
        return Origin(self._path, (document,), start)

    def __getitem__(self, index: int) -> Sample:
        document, start, length = map(int, self._locate(np.asarray(index)))
        # A document's sequences are contiguous, so its first sequence gives the offset.
        sequence = int(self._data.document_indices[document])
        text = self._data.get(sequence, offset=start, length=length + 1)
        text = text[0] if isinstance(text, tuple) else text  # multimodal files return (tokens, mode)
        tokens = torch.from_numpy(text.astype(np.int64))
        smallest, largest = (int(value) for value in tokens.aminmax())
        check_ids(self._path, smallest, largest, self._vocab_size)
        if self._spans is None:
            loss_mask = torch.ones(length)
        else:  # label i is token start + i + 1 of the document
            loss_mask = torch.from_numpy(self._spans.mask(document, start + 1, length))
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": loss_mask}
