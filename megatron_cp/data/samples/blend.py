"""Several files in one data set: the pattern in which they take turns."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.config.names import NAME

logger = logging.getLogger(__name__)
_PERIOD = 1 << 16


class Turns:
    """Which of several sources gives sample i of an endless blend, and which of its own samples that is.

    Megatron's blending order, greedy so that every beginning of it has the right shares, computed for one period and
    repeated: constant memory, and nothing depends on the number of samples that a run will take. A source gets its
    share of the samples to within half of 2**-16. One that is too small to come up in a period is refused; or, with
    ``keep_small``, gets a turn at the period's end, which becomes longer by it.

    Raises:
        DataError: a weight too small to come up in a period, without ``keep_small``.
    """

    def __init__(self, weights: Sequence[float], *, keep_small: bool = False) -> None:
        from megatron.core.datasets import helpers

        self._source = np.zeros(_PERIOD, dtype=np.int16)
        self._nth = np.zeros(_PERIOD, dtype=np.int64)
        shares = np.asarray(weights, dtype=np.float64) / sum(weights)
        helpers.build_blending_indices(self._source, self._nth, shares, len(shares), _PERIOD, False)
        self._counts = np.bincount(self._source, minlength=len(shares))
        small = np.flatnonzero(self._counts == 0)
        if small.size and not keep_small:
            raise DataError(
                f"{NAME.dataset.data_path}: source {int(small[0])} would give less than one sample in {_PERIOD}; "
                "raise its weight or leave it out."
            )
        if small.size:
            self._source = np.append(self._source, small.astype(np.int16))
            self._nth = np.append(self._nth, np.zeros_like(small))
            self._counts[small] = 1
            said = f"{NAME.dataset.data_path}: of each of the sources %s, which are small, comes one sample in %d"
            logger.info(said, small.tolist(), len(self._source))

    def taken(self, count: int) -> list[int]:
        """How many of the first ``count`` samples come from each source."""
        periods, rest = divmod(count, len(self._source))
        counts = periods * self._counts + np.bincount(self._source[:rest], minlength=len(self._counts))
        return [int(number) for number in counts]

    def __call__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, index among its samples) of each sample; all are of one shape."""
        periods, places = np.divmod(indices, len(self._source))
        sources = self._source[places]
        return sources, periods * self._counts[sources] + self._nth[places]
