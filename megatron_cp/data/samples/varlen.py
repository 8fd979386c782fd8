"""Variable-length samples: one a document, with labels and loss mask of its own.

For a document of tokens d[0..n] the sample is ``tokens`` d[0..n-1], ``labels`` d[1..n] and a loss mask of ones, or of
ones where the label is part of the response: no token ever predicts the next document. Lengths are known without
reading the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.data.formats.documents import open_documents
from megatron_cp.data.formats.indexed import check_ids, chunks, first_ends, open_indexed, tokens_between
from megatron_cp.data.samples.contents import Contents
from megatron_cp.data.split import ALL_FOR_TRAINING

Sample = dict[str, torch.Tensor]


class MockVarlenDataset:
    """Random tokens that depend on (seed, index) alone, of given lengths; part of each loss mask is zero.

    Args:
        lengths: tokens of each sample, each at least 1.
        masked_fraction: share of a sample's loss mask that is zero on average, a run of tokens at its start; below 1.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, vocab_size: int, seed: int, masked_fraction: float = 0.0
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if self._lengths.size == 0 or int(self._lengths.min()) < 1:
            raise DataError("mock samples need lengths of 1 or more, and at least one of them")
        self._vocab_size, self._seed, self._masked = vocab_size, seed, masked_fraction
        self.num_tokens = int(self._lengths.sum())

    def __len__(self) -> int:
        return len(self._lengths)

    def contents(self) -> Contents:
        """One epoch; its tokens under the loss as expected, not counted."""
        tokens, most = self.num_tokens, 2 * self._masked  # the share that is masked is drawn from 0 to most, or to 1
        masked = most / 2 if most <= 1 else 1 - 1 / (2 * most)
        return Contents("", len(self), len(self), tokens, tokens * (1 - masked), len(self))

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of samples, int64 as ``indices``."""
        return self._lengths[indices]

    def __getitem__(self, index: int) -> Sample:
        length = int(self._lengths[index])
        rng = np.random.default_rng((self._seed, index))
        text = torch.from_numpy(rng.integers(0, self._vocab_size, length + 1, dtype=np.int64))
        loss_mask = torch.ones(length)
        loss_mask[: int(rng.uniform(0, 2 * self._masked) * length)] = 0.0
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": loss_mask}


class DocumentDataset:
    """The documents of a Megatron ``.bin``/``.idx`` pair, one sample each.

    Args:
        prefix: path of the two files without their endings.
        max_length: most tokens of a sample.
        too_long: ``split`` cuts longer documents into samples of at most ``max_length``; ``refuse`` makes one an error.
        part: shares of the documents at which this data set begins and ends, in the order of the file.
        prompt_lengths: tokens at the start of each document of the file that are no part of the loss.
        vocab_size: token ids must be below it.
        path_to_cache: folder of the index of documents, which is made if it is not there; by default ``cache`` beside
            the files.
        name: what messages call the files, where these were made from another one; by default ``prefix``.

    Documents of fewer than two tokens have nothing to predict and are left out.

    Raises:
        DataError: the files are unusable, no document has two tokens, one is too long, or the index cannot be written;
            when a sample is read, it has a token that is not in the vocabulary.
    """

    def __init__(
        self,
        prefix: str,
        max_length: int,
        too_long: Literal["split", "refuse"] = "split",
        *,
        part: tuple[float, float] = (0.0, 1.0),
        prompt_lengths: np.ndarray | None = None,
        vocab_size: int | None = None,
        path_to_cache: str | None = None,
        name: str | None = None,
    ) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        files = self._files = open_indexed(prefix)
        self._path, self._vocab_size, self._max_length = name or files.prefix, vocab_size, max_length
        self._index = open_documents(files, max_length, path_to_cache)
        self._data = IndexedDataset(files.prefix)
        total = files.num_boundaries - 1
        if prompt_lengths is not None and len(prompt_lengths) != total:
            raise DataError(f"{self._path}: has {total} documents but {len(prompt_lengths)} prompt lengths.")
        self._prompts = prompt_lengths
        first, last = self._part = tuple(round(share * total) for share in part)
        if too_long == "refuse":
            worst, targets = self._index.longest(first, last)
            if targets > max_length:
                counted = " (from 0, lines without text not counted)" if prompt_lengths is not None else ""
                raise DataError(
                    f"{self._path}: document {worst}{counted} has {targets + 1} tokens, more than {max_length} + 1. "
                    f"Fix: {NAME.dataset.too_long}=split, or {NAME.dataset.seq_length}={targets}"
                )
        self._before = int(self._index.samples[first])
        self._num_samples = int(self._index.samples[last]) - self._before
        self.num_tokens = int(self._index.targets[last]) - int(self._index.targets[first])  # of all samples
        if not len(self):
            if first == last and total:
                raise DataError(
                    f"{self._path}: has none of its {total} documents in this part. Fix: {ALL_FOR_TRAINING}"
                )
            where = "no document" if part == (0.0, 1.0) else f"none of the documents {first} to {last - 1} of {total}"
            raise DataError(f"{self._path}: {where} has two tokens or more, so there is nothing to predict.")

    def __len__(self) -> int:
        return self._num_samples

    def contents(self) -> Contents:
        """One epoch. Prompts are summed: four bytes a document are read, of the index alone."""
        (first, last), masked = self._part, 0
        if self._prompts is not None:
            for piece in chunks(first, last):
                masked += int(np.maximum(self._prompts[piece].astype(np.int64) - 1, 0).sum())  # a text's is 0
        ends = first_ends(self._files) if self._prompts is None else ()
        tokens, of_file = tokens_between(self._files, first, last), self._files.num_boundaries - 1
        return Contents(self._path, last - first, of_file, tokens, self.num_tokens - masked, len(self), ends)

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document of the file, first token in it, and number of tokens of each sample; all are of one shape."""
        outside = (indices < 0) | (indices >= len(self))
        if outside.any():
            raise IndexError(f"sample {indices[outside][0]} of {len(self)}")
        samples = self._before + indices
        documents = self._index.documents_of(samples)
        # Of the index only what is asked for is made int64: it is unsigned, and too large to be copied.
        starts = (samples - self._index.samples[documents].astype(np.int64)) * self._max_length
        first, end = (self._index.targets[documents + i].astype(np.int64) for i in range(2))
        return documents, starts, np.minimum(end - first - starts, self._max_length)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of samples, int64 as ``indices``."""
        return self._locate(indices)[2]

    def __getitem__(self, index: int) -> Sample:
        document, start, length = map(int, self._locate(np.asarray(index)))
        # The first of the document's sequences, which lie one after the other in the file.
        sequence = int(self._data.document_indices[document])
        text = self._data.get(sequence, offset=start, length=length + 1)
        text = text[0] if isinstance(text, tuple) else text  # multimodal files give a mode too
        tokens = torch.from_numpy(text.astype(np.int64))
        smallest, largest = (int(value) for value in tokens.aminmax())
        check_ids(self._path, smallest, largest, self._vocab_size)
        loss_mask = torch.ones(length)
        if self._prompts is not None:
            # Label i is token start + i + 1 of the document.
            loss_mask[: max(0, int(self._prompts[document]) - 1 - start)] = 0.0
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": loss_mask}
