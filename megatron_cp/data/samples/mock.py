"""Mock samples of one length: random tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.samples.contents import Contents, Origin


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
