"""Which narrowest blocks of a row are free: a buddy allocator that also hands out three quarters of a block."""

from __future__ import annotations


class Gaps:
    """Free, aligned, power-of-two stretches of a row of ``leaves`` narrowest blocks. ``free``: how many blocks."""

    __slots__ = ("free", "leaves", "starts")

    def __init__(self, leaves: int) -> None:
        self.leaves = self.free = leaves
        # starts[i]: where the free stretches of 2^i blocks begin. A row that is no power of two ends with its smallest.
        self.starts: list[list[int]] = [
            [leaves >> (i + 1) << (i + 1)] if leaves >> i & 1 else [] for i in range(leaves.bit_length())
        ]

    def take(self, width: int) -> int:
        """Take ``width`` blocks (2^i, 3 * 2^i, or all) and return the first, or -1 if no stretch holds them.

        3 * 2^i blocks are the first of a stretch of 4 * 2^i, whose last quarter stays free. The shortest stretch that
        will do is cut.
        """
        if width > self.free:
            return -1
        if width == self.leaves:
            self.free, self.starts = 0, []
            return 0
        starts = self.starts
        low = (width & -width).bit_length() - 1
        need = (width - 1).bit_length()
        i = need
        while i < len(starts) and not starts[i]:
            i += 1
        if i >= len(starts):
            return -1
        start = starts[i].pop()
        while i > need:
            i -= 1
            starts[i].append(start + (1 << i))
        if need > low:
            starts[low].append(start + width)
        self.free -= width
        return start
