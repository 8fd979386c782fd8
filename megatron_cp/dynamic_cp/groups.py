"""The process groups that dynamic context parallelism may use: a buddy tree of aligned blocks of ranks.

Groups that are nested or disjoint can never wait for each other in a circle, and a job needs fewer than two
communicators a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True)
class BuddyTree:
    """Aligned blocks of ranks, level by level; level 0 holds the narrowest blocks, the last level all ranks.

    ``levels[i][j]`` is the half-open range (start, stop) of block j of level i; the parent of block j is block
    ``j // 2`` of the next level. Only the last block of a level may differ in size from the others.
    """

    num_ranks: int
    levels: tuple[tuple[tuple[int, int], ...], ...]

    def size(self, level: int) -> int:
        """Ranks of a block of ``level`` (of the first one: the last block of a level may differ)."""
        start, stop = self.levels[level][0]
        return stop - start

    def is_regular(self, level: int) -> bool:
        """Whether all blocks of ``level`` consist of the same number of narrowest blocks."""
        return level == 0 or self.tail_size(level) == self.size(level)

    def tail_size(self, level: int) -> int:
        """Ranks of the last block of ``level``."""
        start, stop = self.levels[level][-1]
        return stop - start


@lru_cache(maxsize=32)
def buddy_tree(num_ranks: int, min_cp_size: int = 1) -> BuddyTree:
    """The tree over ``num_ranks`` ranks whose narrowest blocks hold ``min_cp_size`` ranks.

    Narrowest blocks start at multiples of ``min_cp_size``; the last one takes the ranks that are left over. Each next
    level joins neighbours in pairs, a last block without a neighbour stays as it is. For powers of two these are
    the aligned power-of-two blocks.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: must be at least 1")
    if not 1 <= min_cp_size <= num_ranks:
        raise ValueError(f"min_cp_size={min_cp_size}: must be between 1 and the number of ranks ({num_ranks})")
    leaves = num_ranks // min_cp_size
    edges = [i * min_cp_size for i in range(leaves)] + [num_ranks]
    blocks = tuple(pairwise(edges))
    levels = [blocks]
    while len(blocks) > 1:
        blocks = tuple((blocks[i][0], blocks[min(i + 1, len(blocks) - 1)][1]) for i in range(0, len(blocks), 2))
        levels.append(blocks)
    return BuddyTree(num_ranks, tuple(levels))


@lru_cache(maxsize=32)
def legal_groups(num_ranks: int, min_cp_size: int = 1) -> tuple[tuple[int, ...], ...]:
    """Every group of ranks that :func:`megatron_cp.dynamic_cp.schedule` may use, widest first, each once.

    Ranks count within the data-and-context-parallel domain. For powers of two these are the aligned blocks of
    min_cp_size * 2^i ranks; any other number of ranks adds the remainder blocks at the end (10 ranks: 8 and 9 form a
    pair below the group of all ten).
    """
    tree = buddy_tree(num_ranks, min_cp_size)
    blocks = {block for level in tree.levels for block in level}
    return tuple(tuple(range(start, stop)) for start, stop in sorted(blocks, key=lambda b: (b[0] - b[1], b[0])))
