"""Detect loss spikes with a robust measure that spikes do not shift."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_WINDOW = 100
_FEWEST = 20  # losses before detection starts
_SMALLEST_SPREAD = 0.005  # of the median: minimum deviation, against false alarms on a flat loss


class SpikeWatch:
    """Detects losses more than ``factor`` deviations above the median of the last 100.

    The deviation is 1.4826 times the median distance to the median, which equals the standard deviation of a normal
    distribution. ``factor`` ``None`` disables detection.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self.usual = math.nan

    def is_spike(self, loss: float) -> bool:
        """Judge the next loss; :attr:`usual` is then the median used."""
        if self._factor is None or not math.isfinite(loss):
            return False
        spike = False
        if len(self._losses) >= _FEWEST:
            self.usual = median(self._losses)
            spread = 1.4826 * median(abs(each - self.usual) for each in self._losses)
            spike = loss - self.usual > self._factor * max(spread, _SMALLEST_SPREAD * abs(self.usual))
        self._losses.append(loss)
        return spike
