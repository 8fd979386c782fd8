"""Order in which a blend takes samples from its sources."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME

logger = logging.getLogger(__name__)
_PERIOD = 1 << 16
_MOST_SOURCES = np.iinfo(np.int16).max  # megatron-core numbers sources in 16 bits


class BlendOrder:
    """Map from sample i of an endless blend to (source, index within the source).

    Megatron's greedy blending order, computed for one period of 2**16 samples and repeated. Memory is constant, and the
    order does not depend on the number of samples of a run. Shares are exact to half of 2**-16. With ``keep_small``, a
    source without a sample in the period gets one at its end.

    Raises:
        DataError: there are too many sources, or one has no sample in the period and ``keep_small`` is false.
    """

    def __init__(self, weights: Sequence[float], *, keep_small: bool = False) -> None:
        from megatron.core.datasets import helpers

        if len(weights) > _MOST_SOURCES:
            raise DataError(
                f"{NAME.dataset.data_path}: has {len(weights)} files or classes of length, more than {_MOST_SOURCES}. "
                "Fix: join some of the files"
            )
        self._source = np.zeros(_PERIOD, dtype=np.int16)
        self._nth = np.zeros(_PERIOD, dtype=np.int64)
        shares = np.asarray(weights, dtype=np.float64) / sum(weights)
        helpers.build_blending_indices(self._source, self._nth, shares, len(shares), _PERIOD, False)
        self._counts = np.bincount(self._source, minlength=len(shares))
        small = np.flatnonzero(self._counts == 0)
        if small.size and not keep_small:
            raise DataError(
                f"{NAME.dataset.data_path}: source {int(small[0])} would give less than one sample in {_PERIOD}. "
                "Fix: raise its weight, or remove it"
            )
        if small.size:
            self._source = np.append(self._source, small.astype(np.int16))
            self._nth = np.append(self._nth, np.zeros_like(small))
            self._counts[small] = 1
            text = f"{NAME.dataset.data_path}: the small sources %s give one sample in %d each"
            logger.info(text, small.tolist(), len(self._source))

    def taken(self, count: int) -> list[int]:
        """Return how many of the first ``count`` samples come from each source."""
        periods, rest = divmod(count, len(self._source))
        counts = periods * self._counts + np.bincount(self._source[:rest], minlength=len(self._counts))
        return [int(number) for number in counts]

    def __call__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, index within the source) of each sample."""
        periods, places = np.divmod(indices, len(self._source))
        sources = self._source[places]
        return sources, periods * self._counts[sources] + self._nth[places]
