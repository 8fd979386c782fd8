"""Several files in one data set: what ``dataset.data_path`` says, and the pattern in which they take turns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_cp.errors import DataError

_PERIOD = 1 << 16


def parse_blend(data_path: Any) -> tuple[list[str], list[float] | None]:
    """``dataset.data_path`` as (paths, weights): a path, a list of paths, or weight, path, weight, path, ...

    Raises:
        DataError: nothing given, a weight without its path, or a weight that is not above zero.
    """
    if not data_path:
        raise DataError("dataset.data_path is not set: give the prefix of a .bin/.idx pair, or dataset.kind=mock.")
    items = [str(item) for item in ([data_path] if isinstance(data_path, str) else data_path)]
    if _number(items[0]) is None or os.path.exists(items[0] + ".idx"):
        return items, None
    weights = [_number(item) for item in items[0::2]]
    if len(items) % 2 or None in weights:
        raise DataError(
            f"dataset.data_path={items}: a blend is weight, prefix, weight, prefix, ... "
            "or a list of prefixes without any weight."
        )
    if min(w for w in weights if w is not None) <= 0:
        raise DataError(f"dataset.data_path={items}: every weight must be above zero; leave out what is not wanted.")
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
    share of the samples to within half of 2**-16.

    Raises:
        DataError: a weight too small to come up in a period.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        from megatron.core.datasets import helpers

        self._source = np.zeros(_PERIOD, dtype=np.int16)
        self._nth = np.zeros(_PERIOD, dtype=np.int64)
        shares = np.asarray(weights, dtype=np.float64) / sum(weights)
        helpers.build_blending_indices(self._source, self._nth, shares, len(shares), _PERIOD, False)
        self._counts = np.bincount(self._source, minlength=len(shares))
        if self._counts.min() == 0:
            raise DataError(
                f"dataset.data_path: source {int(self._counts.argmin())} would give less than one sample in {_PERIOD}; "
                "raise its weight or leave it out."
            )

    def __call__(self, index: int) -> tuple[int, int]:
        """(source, index among its samples)."""
        period, place = divmod(index, _PERIOD)
        source = int(self._source[place])
        return source, period * int(self._counts[source]) + int(self._nth[place])
