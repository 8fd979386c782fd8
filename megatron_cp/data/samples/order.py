"""The order in which samples are dealt: shuffled anew every epoch, and a function of the sample's number alone.

Nothing is stored and nothing depends on how long a run is: the state of a data set is the number of samples consumed,
and a run that is made longer goes on in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 4  # enough for a strong pseudorandom permutation (Luby and Rackoff, 1988)


def shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Item at ``position`` of a pseudorandom permutation of ``range(count)``, one for each (seed, epoch).

    A balanced Feistel network over the next power of four, walked until it lands below ``count``: less than four
    steps on average (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Constant time and memory,
    where a shuffled array would cost eight bytes a document on every rank.
    """
    half, key = _half_width(count), _mix(_mix(seed & _MASK) + epoch)
    while True:
        position = _step(position, half, key)
        if position < count:
            return position


def shuffled_all(positions: NDArray[np.int64], count: int, seed: int, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
    """:func:`shuffled` of many positions, each of an epoch of its own; all are int64 [n]."""
    half, keys = _half_width(count), _mix(_mix(seed & _MASK) + epochs.astype(np.uint64))
    items = _step(positions.astype(np.uint64), half, keys)
    while (outside := np.flatnonzero(items >= count)).size:
        items[outside] = _step(items[outside], half, keys[outside])
    return items.astype(np.int64)


def _half_width(count: int) -> int:
    """Bits of each half of a position."""
    return max(1, ((count - 1).bit_length() + 1) // 2)


def _step(position: Any, half: int, key: Any) -> Any:
    """The network once, for a position and key that are integers or arrays (uint64)."""
    low = (1 << half) - 1
    left, right = position >> half, position & low
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(key + (turn * _GOLDEN & _MASK) + right) & low)
    return left << half | right


def _mix(x: Any) -> Any:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): every bit of the input changes half of the output's.

    Modulo 2**64, to which integers are cut, and by which arrays (uint64) wrap.
    """
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
