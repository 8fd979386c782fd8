"""Several files in one data set: what ``dataset.data_path`` says, and the pattern in which they take turns."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_cp.errors import DataError

logger = logging.getLogger(__name__)
_PERIOD = 1 << 16


def parse_blend(data_path: Any, name: str = "dataset.data_path") -> tuple[list[str], list[float] | None]:
    """``dataset.data_path``, or the setting ``name``, as (paths, weights).

    It is a path, a list of paths, or weight, path, weight, path, ...

    Raises:
        DataError: nothing given, a weight without its path, or a weight that is not above zero.
    """
    if not data_path:
        raise DataError(f"{name} is not set: give the prefix of a .bin/.idx pair, or dataset.kind=mock.")
    items = [str(item) for item in ([data_path] if isinstance(data_path, str) else data_path)]
    if _number(items[0]) is None or os.path.exists(items[0] + ".idx"):
        return items, None
    weights = [_number(item) for item in items[0::2]]
    if len(items) % 2 or None in weights:
        raise DataError(
            f"{name}={items}: a blend is weight, prefix, weight, prefix, ... or a list of prefixes without any weight."
        )
    if min(w for w in weights if w is not None) <= 0:
        raise DataError(f"{name}={items}: every weight must be above zero; leave out what is not wanted.")
    return items[1::2], [w for w in weights if w is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
                f"dataset.data_path: source {int(small[0])} would give less than one sample in {_PERIOD}; "
                "raise its weight or leave it out."
            )
        if small.size:
            self._source = np.append(self._source, small.astype(np.int16))
            self._nth = np.append(self._nth, np.zeros_like(small))
            self._counts[small] = 1
            said = "dataset.data_path: of each of the sources %s, which are small, comes one sample in %d"
            logger.info(said, small.tolist(), len(self._source))

    def __call__(self, index: int) -> tuple[int, int]:
        """(source, index among its samples)."""
        source, nth = self.of_all(np.asarray(index))
        return int(source), int(nth)

    def of_all(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of many samples; all are of one shape."""
        periods, places = np.divmod(indices, len(self._source))
        sources = self._source[places]
        return sources, periods * self._counts[sources] + self._nth[places]
