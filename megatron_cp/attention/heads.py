"""Split of heads over ranks of an all-to-all, and into groups. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_cp.attention.transports.registry import TRANSPORTS

GATHERED_TOKENS = 8192  # of a piece in which a group of heads is projected; of all ranks that divide the sequence


def numbers_of_groups(heads: int, kv_heads: int, exchanging: Collection[int]) -> list[int]:
    """Return the numbers of groups into which a rank's heads can be divided.

    A group is whole key/value heads with their query heads, or some of the query heads of one.

    Args:
        heads: query heads of the rank.
        kv_heads: its key/value heads; 0 where it projects a part of one. Then all heads are one group.
        exchanging: numbers of ranks that share the heads in an all-to-all.
    """
    divisors = [count for count in range(1, (heads if kv_heads else 1) + 1) if heads % count == 0]
    whole = [count for count in divisors if kv_heads % count == 0 or count % kv_heads == 0]
    return [count for count in whole if all(heads // count % ranks == 0 for ranks in exchanging)]


def sharing_groups(groups: int, kv_heads: int) -> int:
    """Return how many of a rank's groups attend to the same key/value head."""
    return max(1, groups // max(1, kv_heads))


@dataclass(frozen=True)
class HeadSplit:
    """Query and key/value heads of each of ``size`` ranks."""

    heads: int
    kv_heads: int
    size: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, size: int) -> HeadSplit:
        if heads % size:
            others = " or ".join(repr(t.name) for t in TRANSPORTS.values() if not t.exchanges_heads)
            divisors = [n for n in range(1, size + 1) if heads % n == 0]
            raise ValueError(
                f"query has {heads} heads on this rank, which are not divisible by the all-to-all group's {size} ranks;"
                f" use a group of {' or '.join(map(str, divisors))}, or comm_type {others}"
            )
        return cls(heads, kv_heads, size)

    def query(self, rank: int) -> slice:
        share = self.heads // self.size
        return slice(rank * share, (rank + 1) * share)

    def kv(self, rank: int) -> slice:
        """Return the key/value heads that the rank's query heads use."""
        group, mine = self.heads // self.kv_heads, self.query(rank)
        return slice(mine.start // group, (mine.stop - 1) // group + 1)

    def expansion(self, rank: int) -> list[int] | None:
        """Return the local key/value head of each query head, if they are shared unevenly."""
        mine, kv = self.query(rank), self.kv(rank)
        used = [head // (self.heads // self.kv_heads) - kv.start for head in range(mine.start, mine.stop)]
        return None if shared_evenly(used) else used


def shared_evenly(used: Sequence[int]) -> bool:
    """Return whether neighbours share equally: ``used`` is like 0 0 1 1 2 2."""
    each = len(used) // (used[-1] + 1)
    return list(used) == [index // each for index in range(len(used))]
