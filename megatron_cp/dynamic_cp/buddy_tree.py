"""Process groups of dynamic context parallelism: a buddy tree of ranks.

Every rank runs its groups in the order of microbatches, so groups cannot deadlock. There are at most two groups a rank
in all, and a rank is in at most 1 + log2(num_ranks) of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.parallel.layout import RankLayout

Positions = tuple[int, ...]  # consecutive ranks of a domain, numbered within it


@dataclass(frozen=True)
class BuddyTree:
    """Aligned blocks of ranks by level, from the narrowest blocks (0) to all ranks.

    ``levels[i][j]`` is the half-open range (start, stop) of block j of level i; the parent of block j is block
    ``j // 2`` of the next level. Only the last block of a level may differ in size.
    """

    num_ranks: int
    levels: tuple[tuple[tuple[int, int], ...], ...]

    def size(self, level: int) -> int:
        """Return the ranks of the level's first block; only the last block may differ."""
        start, stop = self.levels[level][0]
        return stop - start

    def is_regular(self, level: int) -> bool:
        """Return whether all blocks of ``level`` have the same number of narrowest blocks."""
        return level == 0 or self.tail_size(level) == self.size(level)

    def tail_size(self, level: int) -> int:
        """Return the ranks of the level's last block."""
        start, stop = self.levels[level][-1]
        return stop - start


@lru_cache(maxsize=32)
def buddy_tree(num_ranks: int, min_cp_size: int = 1) -> BuddyTree:
    """Build the tree of ``num_ranks`` with blocks of ``min_cp_size`` or more.

    Narrowest blocks start at multiples of ``min_cp_size``; the last one includes the remaining ranks. Each next level
    joins neighbours in pairs; a last block without a neighbour stays. For powers of two these are the aligned
    power-of-two blocks.
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
def legal_groups(num_ranks: int, min_cp_size: int = 1) -> tuple[Positions, ...]:
    """Return all groups that a schedule may use, widest first.

    Ranks are numbered within the data-and-context-parallel domain. For powers of two these are the aligned blocks of
    min_cp_size * 2^i ranks; other numbers add remainder blocks at the end (10 ranks: 8 and 9 form a pair below the
    group of all ten).
    """
    tree = buddy_tree(num_ranks, min_cp_size)
    blocks = {block for level in tree.levels for block in level}
    return tuple(tuple(range(start, stop)) for start, stop in sorted(blocks, key=lambda b: (b[0] - b[1], b[0])))


def fixed_groups(num_ranks: int, cp_size: int) -> tuple[Positions, ...]:
    """Return the groups of packed static CP: neighbours, ``cp_size`` each."""
    return tuple(tuple(range(start, start + cp_size)) for start in range(0, num_ranks, cp_size))


def configured_blocks(model: ModelConfig, of_evaluation: int | None, layout: RankLayout) -> tuple[Positions, ...]:
    """Return the groups of a run's packed microbatches, as positions in a domain.

    Empty without packing. ``of_evaluation`` is ``dist.eval_context_parallel_size``.
    """
    ranks = layout.dp * layout.cp
    blocks: tuple[Positions, ...] = ()
    if model.dynamic_context_parallel:
        blocks = legal_groups(ranks, model.min_dynamic_context_parallel_size)
    elif model.sequence_packing_scheduler is not None:
        blocks = fixed_groups(ranks, layout.cp)
    if of_evaluation is not None:
        blocks += tuple(block for block in fixed_groups(ranks, of_evaluation) if block not in blocks)
    return blocks


def all_to_all_size(block: Positions, heads: int, ranks_per_node: int) -> int:
    """Return the ranks of a block's all-to-all level in the two-level transport.

    The largest number of neighbours that stay in one node (or in the configured all-to-all size), divide the block and
    divide the heads: 1 is a ring only, the whole block an all-to-all only.

    Args:
        heads: query heads of a tensor-parallel rank. Fewer key/value heads are shared.
        ranks_per_node: neighbouring ranks of the domain that may form an all-to-all group, counted from position 0.
    """

    def stays_inside(size: int) -> bool:
        firsts = block[::size]
        return all(first // ranks_per_node == (first + size - 1) // ranks_per_node for first in firsts)

    sizes = range(1, min(len(block), ranks_per_node) + 1)
    return max(size for size in sizes if len(block) % size == 0 and heads % size == 0 and stays_inside(size))


def group_line(legal: Iterable[Positions], *, at_start: bool) -> str:
    """Format the log line of a run's groups by size.

    Example: ``DYNAMIC_CONTEXT_PARALLEL_GROUPS 2:[0-1] 1:2 ranks alone``. Positions are numbered within a domain; all
    domains have the same groups.
    """
    by_size: dict[int, list[Positions]] = {}
    for block in sorted(legal, key=lambda block: (-len(block), block)):
        by_size.setdefault(len(block), []).append(block)
    ranks = 1 + max(block[-1] for blocks in by_size.values() for block in blocks)
    by_size.pop(1, None)
    parts = []
    for size, blocks in by_size.items():
        shown = [f"[{block[0]}-{block[-1]}]" for block in blocks[:4]]
        more = f",... {len(blocks)} in total" if len(blocks) > len(shown) else ""
        parts.append(f"{size}:{','.join(shown)}{more}")
    parts.append(f"1:{ranks} ranks alone" if ranks > 1 else "1:[0]")
    when = "at the start" if at_start else "before their first use"
    return f"DYNAMIC_CONTEXT_PARALLEL_GROUPS {' '.join(parts)} (created {when})"
