"""Free narrowest blocks of a row: a buddy allocator."""

from __future__ import annotations


class Gaps:
    """Free aligned power-of-two stretches of a row; ``free`` counts blocks."""

    __slots__ = ("free", "leaves", "starts")

    def __init__(self, leaves: int) -> None:
        self.leaves = self.free = leaves
        # starts[i]: starts of free stretches of 2^i blocks. A row that is not a power of two ends with its smallest.
        self.starts: list[list[int]] = [
            [leaves >> (i + 1) << (i + 1)] if leaves >> i & 1 else [] for i in range(leaves.bit_length())
        ]

    def take(self, width: int) -> int:
        """Take ``width`` blocks (2^i, or all) from the shortest stretch that holds them.

        Returns the first block, or -1 if no stretch is long enough.
        """
        if width > self.free:
            return -1
        if width == self.leaves:
            self.free, self.starts = 0, []
            return 0
        need = width.bit_length() - 1
        i = next((i for i in range(need, len(self.starts)) if self.starts[i]), -1)
        if i < 0:
            return -1
        start = self.starts[i].pop()
        for half in range(need, i):
            self.starts[half].append(start + (1 << half))
        self.free -= width
        return start
