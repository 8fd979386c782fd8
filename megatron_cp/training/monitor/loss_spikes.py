"""Loss spikes: a loss far above its recent ones, by a measure that the spikes themselves do not move."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_WINDOW = 100
_FEWEST = 20  # losses to judge by
_SMALLEST_SPREAD = 0.005  # of the median: a loss that hardly moves must not make every ripple a spike


class SpikeWatch:
    """Tells which losses are spikes: more than ``factor`` standard deviations above the median of the last 100.

    The standard deviation is 1.4826 times the median distance to the median (that of normally distributed losses).
    ``factor`` ``None`` looks at nothing.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self.usual = math.nan

    def is_spike(self, loss: float) -> bool:
        """Judge the next loss; :attr:`usual` is then the median that it was compared with."""
        if self._factor is None or not math.isfinite(loss):
            return False
        spike = False
        if len(self._losses) >= _FEWEST:
            self.usual = median(self._losses)
            spread = 1.4826 * median(abs(each - self.usual) for each in self._losses)
            spike = loss - self.usual > self._factor * max(spread, _SMALLEST_SPREAD * abs(self.usual))
        self._losses.append(loss)
        return spike
