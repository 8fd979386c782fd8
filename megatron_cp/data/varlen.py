"""Variable-length samples: one a document, with labels and loss mask of its own.

For a document of tokens d[0..n] the sample is ``tokens`` d[0..n-1], ``labels`` d[1..n] and a loss mask of ones: no
token ever predicts the next document. Lengths are known without reading the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_cp.data.indexed import open_indexed
from megatron_cp.errors import DataError

Sample = dict[str, torch.Tensor]


class MockVarlenDataset:
    """Random tokens that depend on (seed, index) alone, of given lengths; part of each loss mask is zero.

    Args:
        lengths: tokens of each sample, each at least 1.
        masked_fraction: share of a sample's loss mask that is zero on average, a run of tokens at its start.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, vocab_size: int, seed: int, masked_fraction: float = 0.0
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if self._lengths.size == 0 or int(self._lengths.min()) < 1:
            raise DataError("mock samples need lengths of 1 or more, and at least one of them")
        if not 0.0 <= masked_fraction < 1.0:
            raise DataError(f"dataset.mock_masked_fraction={masked_fraction}: must be in [0, 1).")
        self._vocab_size, self._seed, self._masked = vocab_size, seed, masked_fraction

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, index: int) -> int:
        return int(self._lengths[index])

    def __getitem__(self, index: int) -> Sample:
        length = self.length(index)
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

    Documents of fewer than two tokens have nothing to predict and are left out.

    Raises:
        DataError: the files are unusable, no document has two tokens, or one is too long.
    """

    def __init__(self, prefix: str, max_length: int, too_long: str = "split") -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        if too_long not in ("split", "refuse"):
            raise DataError(f"dataset.too_long={too_long}: must be split or refuse.")
        files = open_indexed(prefix)
        self._data = IndexedDataset(files.prefix)
        sequence_lengths = np.asarray(self._data.sequence_lengths, dtype=np.int64)
        targets = sequence_lengths - 1
        if too_long == "refuse" and targets.max(initial=0) > max_length:
            worst = int(targets.argmax())
            raise DataError(
                f"{files.prefix}: document {worst} has {int(sequence_lengths[worst])} tokens, more than "
                f"{max_length} + 1. Raise dataset.seq_length, or cut documents with dataset.too_long=split."
            )
        pieces = np.maximum(-(-targets // max_length), 0)
        self._document = np.repeat(np.arange(len(pieces)), pieces)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._start = (np.arange(len(self._document)) - first) * max_length
        self._lengths = np.minimum(targets[self._document] - self._start, max_length)
        if self._lengths.size == 0:
            raise DataError(f"{files.prefix}: no document has two tokens or more, so there is nothing to predict.")

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, index: int) -> int:
        return int(self._lengths[index])

    def __getitem__(self, index: int) -> Sample:
        length = self.length(index)
        text = self._data.get(int(self._document[index]), offset=int(self._start[index]), length=length + 1)
        tokens = torch.from_numpy(text.astype(np.int64))
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(length)}
