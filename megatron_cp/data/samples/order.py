"""Sample order: a new permutation each epoch, computed from the sample's number.

Nothing is stored, and nothing depends on the length of a run. The state of a data set is the number of consumed
samples, and a longer run continues in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 4  # enough for a strong pseudorandom permutation (Luby and Rackoff, 1988)


def shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Return item ``position`` of a pseudorandom permutation of ``range(count)``.

    There is one permutation for each (seed, epoch): a balanced Feistel network over the next power of four, repeated
    until the result is below ``count``. This takes less than four steps on average (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002), and no memory; a shuffled array would take eight bytes a document on every rank.
    """
    half, key = _half_width(count), _mix(_mix(seed & _MASK) + epoch)
    while True:
        position = _step(position, half, key)
        if position < count:
            return position


def shuffled_all(positions: NDArray[np.int64], count: int, seed: int, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return :func:`shuffled` of each (position, epoch); all arrays are int64 [n]."""
    half, keys = _half_width(count), _mix(_mix(seed & _MASK) + epochs.astype(np.uint64))
    items = _step(positions.astype(np.uint64), half, keys)
    while (outside := np.flatnonzero(items >= count)).size:
        items[outside] = _step(items[outside], half, keys[outside])
    return items.astype(np.int64)


def _half_width(count: int) -> int:
    """Return the number of bits of each half of a position."""
    return max(1, ((count - 1).bit_length() + 1) // 2)


def _step(position: Any, half: int, key: Any) -> Any:
    """Apply the network once; position and key are integers or uint64 arrays."""
    low = (1 << half) - 1
    left, right = position >> half, position & low
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(key + (turn * _GOLDEN & _MASK) + right) & low)
    return left << half | right


def _mix(x: Any) -> Any:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014), modulo 2**64."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
