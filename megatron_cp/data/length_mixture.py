"""Parse ``dataset.length_mixture``: shares of tokens between document lengths.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_LEAST = 1e-6


class LengthMixture(NamedTuple):
    """Classes of document length, from short to long, and their shares of tokens.

    Class k has the documents of at least ``bounds[k - 1]`` and fewer than ``bounds[k]`` tokens. ``shares`` sum to 1.
    """

    bounds: tuple[int, ...]
    shares: tuple[float, ...]

    def name(self, number: int) -> str:
        """Return the lengths of a class as text."""
        if number == 0:
            return f"below {self.bounds[0]:,} tokens"
        if number == len(self.bounds):
            return f"{self.bounds[-1]:,} tokens or more"
        return f"{self.bounds[number - 1]:,} to {self.bounds[number] - 1:,} tokens"


def parse_mixture(given: Sequence[float]) -> LengthMixture:
    """Return the classes of share, length, share, ..., length, share.

    Raises:
        ValueError: an entry is missing, lengths do not rise, or a share is not positive.
    """
    shares, bounds = list(given[0::2]), list(given[1::2])
    if len(given) % 2 == 0 or not bounds:
        raise ValueError("a mixture is share, length, share, length, share, ...: it begins and ends with a share")
    for bound in bounds:
        if bound != int(bound) or bound < 2:
            raise ValueError(f"length {bound:g} must be a whole number of tokens, 2 or more")
    for shorter, longer in pairwise(bounds):
        if longer <= shorter:
            raise ValueError(f"lengths must rise, but {longer:g} follows {shorter:g}")
    for share in shares:
        if not 0 < share < math.inf:
            raise ValueError(f"share {share:g} must be above zero")
    total = math.fsum(shares)
    if min(shares) / total < _LEAST:
        raise ValueError(f"share {min(shares):g} is less than {_LEAST:g} of all shares, so it is hardly ever drawn")
    return LengthMixture(tuple(map(int, bounds)), tuple(share / total for share in shares))
