"""Mock samples: random tokens, of one length or of many."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.samples.contents import Contents, Origin
from megatron_cp.data.samples.split_files import SPLITS
from megatron_cp.data.samples.varlen import MockVarlenDataset
from megatron_cp.data.split import shares
from megatron_cp.dynamic_cp.distributions import DISTRIBUTIONS, read_lengths, sample_lengths

logger = logging.getLogger(__name__)


class MockDataset(Dataset):
    """Random tokens that depend on (seed, index) only, so every layout gets the same.

    On average, ``mock_masked_fraction`` of the loss mask is zero: one contiguous range per sample, of random length and
    position. Samples, and parts of a sequence, then have different numbers of loss tokens.
    """

    def __init__(self, config: DatasetConfig, vocab_size: int, seed: int, num_samples: int) -> None:
        self._config, self._vocab_size, self._seed, self._num_samples = config, vocab_size, seed, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def sources(self) -> list[Contents]:
        """Return the distinct samples, with the expected number of loss tokens."""
        samples, masked = self._config.mock_num_samples, self._config.mock_masked_fraction
        tokens = samples * self._config.seq_length
        return [Contents("", None, None, tokens, tokens * (1 - masked), samples)]

    def taken(self, count: int) -> Sequence[float]:
        """Return how many of the first ``count`` samples come from each source."""
        return [count]

    def origin(self, index: int) -> Origin:
        """Return the number of a sample among the distinct samples."""
        return Origin("", (int(index) % self._config.mock_num_samples,), 0)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length, masked = self._config.seq_length, self._config.mock_masked_fraction
        rng = np.random.default_rng((self._seed, int(index) % self._config.mock_num_samples))
        text = torch.from_numpy(rng.integers(0, self._vocab_size, length + 1, dtype=np.int64))
        loss_mask = torch.ones(length, dtype=torch.float32)
        spread = min(masked, 1.0 - masked)
        count = min(round(rng.uniform(masked - spread, masked + spread) * length), length - 1)
        start = rng.integers(0, length - count + 1)
        loss_mask[start : start + count] = 0.0
        return {
            "tokens": text[:-1].clone(),
            "labels": text[1:].clone(),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(length, dtype=torch.int64),
        }


def mock_documents(config: DatasetConfig, vocab_size: int, seed: int, split: str) -> MockVarlenDataset:
    """Return the mock documents of a split.

    Held-out documents are the split's share of ``mock_num_samples``.

    Raises:
        DataError: the lengths cannot be read.
    """
    longest, named, parts = config.seq_length, config.mock_lengths, shares(config.split)
    count, share = config.mock_num_samples, dict(zip(SPLITS, parts, strict=False)).get(split, 0.0) / sum(parts)
    if split != SPLITS[0] and share:  # without a share, there are as many as for training
        count = max(1, round(share * count))
    try:
        if named in DISTRIBUTIONS:
            lengths = sample_lengths(named, count, longest, seed)
        else:
            lengths = np.resize(read_lengths(named), count)
            if cut := int((lengths > longest).sum()):
                logger.info(
                    f"{NAME.dataset.mock_lengths}=%s: %d of %d cut to {NAME.dataset.seq_length}", named, cut, count
                )
            lengths = np.minimum(lengths, longest)
    except ValueError as error:
        raise DataError(f"{NAME.dataset.mock_lengths}={named}: {error}") from error
    return MockVarlenDataset(lengths, vocab_size, seed, config.mock_masked_fraction)
