"""Lower bound of the rows that ranks must receive for a pack's attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_cp.attention.placement.planner import Piece, causal_pairs


def rows_received(placement: Sequence[Sequence[Piece]]) -> int:
    """Count the key/value rows that ranks need and do not have, under a causal mask."""
    rows = 0
    for pieces in placement:
        ends: dict[int, int] = {}
        for document, start, stop in pieces:
            ends[document] = max(ends.get(document, 0), stop)
            rows -= stop - start
        rows += sum(ends.values())
    return rows


def lower_bound(lengths: Sequence[int], size: int, most_work: int) -> int:
    """Return the fewest rows to receive with equal tokens and bounded work.

    No rank has more than ``most_work`` query-key pairs. Sort the ranks that have tokens of a document by their last
    one, e_1 <= e_2 <= ... = length. Each needs the keys up to its e, so all receive the sum of the e without the last.
    The m ranks with the latest tokens have all tokens from the e before theirs on. They also have m ranks' tokens,
    which are at least as much work as the pack's lightest. So e is bounded by m ranks' work. Exact for one document;
    the bound lets every document have the lightest tokens.
    """
    longest = max(lengths, default=0)
    fewest, most = sum(lengths) // size, -(-sum(lengths) // size)
    # Number of tokens of each position in the pack, and cumulative tokens and work of the lightest.
    at = len(lengths) - np.searchsorted(np.sort(np.array(lengths, dtype=np.int64)), np.arange(longest), side="right")
    tokens = np.concatenate([[0], np.cumsum(at)])
    work = np.concatenate([[0], np.cumsum(at * np.arange(1, longest + 1))])

    def lightest(count: int) -> int:
        position = int(np.searchsorted(tokens, count, side="right")) - 1
        return int(work[position] + (count - tokens[position]) * (position + 1))

    def possible(length: int, end: int, ranks: int) -> bool:
        tail = length - end
        fill = lightest(max(0, ranks * fewest - tail))
        return tail <= ranks * most and causal_pairs(end, length) + fill <= ranks * most_work

    rows = 0
    for length in sorted(lengths, reverse=True):
        if possible(length, 0, 1):
            break
        for ranks in range(1, size):
            low, high = 0, length  # the earliest possible e
            while low < high:
                middle = (low + high) // 2
                if possible(length, middle, ranks):
                    high = middle
                else:
                    low = middle + 1
            rows += low
            if not low:
                break
    return rows
