"""Place a pack's documents on ranks: equal tokens, nearly equal work, few cuts.

Pure Python.

Each rank but the last is filled in turn with its share of the tokens and with the mean work of the remaining ranks. It
takes the longest documents that fit beside the shortest ones. If none fits, it takes the *tail* of a document, as long
as the work allows beside the shortest documents. Rows to fill up come from the *head* of a document.

A rank with tokens of a document up to position e needs the keys of its first e tokens. A cut therefore costs as many
rows as the remaining part ends at. Long tails beside short documents leave the least; a head costs nothing on a rank
that has the document's tail.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import add, floordiv, itemgetter, mul, sub
from typing import NamedTuple

TOLERANCE = 0.005  # of a rank's work: fills that are as near to the mean cut no document
ACCEPTED = 1.02  # slowest rank over the mean, above which the plan that prefers balance is tried too
STRICT = 1 << 60


class Piece(NamedTuple):
    """Tokens [start, stop) of a document of the pack."""

    document: int
    start: int
    stop: int


Placement = tuple[tuple[Piece, ...], ...]


def causal_pairs(start: int, stop: int) -> int:
    """Count the keys that the queries [start, stop) see under a causal mask."""
    return (stop - start) * (start + stop + 1) // 2


def place(lengths: Sequence[int], size: int) -> Placement:
    """Return the pieces of each of ``size`` ranks, in any order.

    The first ranks have one token more if ``size`` does not divide the sum. Every token is placed once. Raises
    ValueError for a size below 1 or a negative length.
    """
    if size < 1 or min(lengths, default=0) < 0:
        raise ValueError(f"size={size} must be at least 1, and lengths must not be negative")
    placed, imbalance = _spread(_Pool(lengths), size, saves_rows=True)
    if imbalance > ACCEPTED:
        placed = min((placed, imbalance), _spread(_Pool(lengths), size, saves_rows=False), key=itemgetter(1))[0]
    return placed


def _spread(pool: _Pool, size: int, saves_rows: bool) -> tuple[Placement, float]:
    """Fill the ranks; return their pieces, and the slowest rank's work over the mean."""
    tokens, work = sum(pool.stops), pool.work_before[-1]
    ranks: list[tuple[Piece, ...]] = []
    works: list[int] = []
    for rank in range(size):
        left = size - rank
        share = tokens // size + (rank < tokens % size)
        mean = (work - sum(works)) / left
        ranks.append(tuple(_Rank(pool, share, mean, left if saves_rows else STRICT).fill()))
        works.append(sum([(stop - start) * (start + stop + 1) // 2 for _, start, stop in ranks[-1]]))
    return tuple(ranks), max(works) * size / work if work else 1.0


class _Pool:
    """Parts of documents that no rank has yet, by rising density (start + stop).

    ``tokens_before`` and ``work_before`` are cumulative; their first entries count what is gone.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.documents = sorted((i for i, length in enumerate(lengths) if length), key=lengths.__getitem__)
        self.stops = [int(lengths[index]) for index in self.documents]
        self.starts = [0] * len(self.stops)
        self.tokens_before, self.work_before = [0], [0]
        self._count_from(0)

    def shorten(self, index: int, tokens: int) -> None:
        """Remove the head of the lightest part that will be left; it stays the first."""
        start = self.starts[index]
        self.starts[index] += tokens
        self.tokens_before[index] += tokens
        self.work_before[index] += causal_pairs(start, start + tokens)

    def remove(self, first: int, others: set[int]) -> None:
        """Remove the ``first`` parts; replace ``others`` by what is left of them."""
        changed, kept = len(self.stops), []
        for changed in sorted(others, reverse=True):
            document, start, stop = self.documents[changed], self.starts[changed], self.stops[changed]
            del self.documents[changed], self.starts[changed], self.stops[changed]
            if start < stop:
                kept.append((document, start, stop))
        del self.documents[:first], self.starts[:first], self.stops[:first]
        del self.tokens_before[:first], self.work_before[:first]
        changed = max(0, changed - first)
        for document, start, stop in kept:
            at = bisect_left(range(len(self.stops)), start + stop, key=lambda i: self.starts[i] + self.stops[i])
            self.documents.insert(at, document)
            self.starts.insert(at, start)
            self.stops.insert(at, stop)
            changed = min(changed, at)
        self._count_from(changed)

    def _count_from(self, index: int) -> None:
        starts, stops = self.starts[index:], self.stops[index:]
        sizes = list(map(sub, stops, starts))
        doubled = map(mul, sizes, map(add, map(add, starts, stops), repeat(1)))
        for before, parts in ((self.tokens_before, sizes), (self.work_before, map(floordiv, doubled, repeat(2)))):
            before[index:] = accumulate(parts, initial=before[index])


class _Rank:
    """A rank to fill from the pool: tokens and work that it still needs.

    ``slope``: positions that a head may lie further back for each row that it saves.
    """

    def __init__(self, pool: _Pool, tokens: int, work: float, slope: int) -> None:
        self.pool, self.starts, self.stops = pool, pool.starts, pool.stops
        self.tokens_before, self.work_before = pool.tokens_before, pool.work_before
        self.tokens, self.work, self.slope = tokens, work, slope
        self.slack = TOLERANCE * work
        self.picked: list[int] = []
        self.end = len(self.starts)  # parts from here on are picked, or do not fit

    def fill(self) -> list[Piece]:
        """Take pieces from the pool."""
        cut = self._pick()
        if cut is None:
            return self._take(None, 0)
        tail = self._tail(cut)
        if self._with_tail(cut, tail) < self.work - self.slack:
            self.slope = STRICT
            tail = self._tail(cut)
        return self._take(cut, tail)

    def _tail(self, index: int) -> int:
        """Return the longest tail that the work allows."""
        return self._longest(lambda tail: self._with_tail(index, tail) <= self.work, self._room(index))

    def _pick(self) -> int | None:
        """Pick whole parts until the lightest fill the rest; return the part to cut."""
        while self.tokens:
            whole, missing = self._lightest(self.tokens, self.end)
            lightest = self._work_of(whole)
            if missing and whole < self.end:
                lightest += causal_pairs(self.starts[whole], self.starts[whole] + missing)
            if whole >= self.end or lightest >= self.work - self.slack:
                return None
            fits = self._heaviest_that_fits(whole)
            if fits is None or fits < whole or self._strands(fits):
                return self._to_cut(whole)
            if fits == whole and self._with_whole(fits) <= lightest:
                return self._to_cut(whole)
            self.picked.append(fits)
            self.tokens -= self._size(fits)
            self.work -= self._pairs(fits)
            self.end = fits
        return None

    def _heaviest_that_fits(self, first: int) -> int | None:
        limit = self.work + self.slack
        if self._with_whole(self.end - 1) <= limit:
            return self.end - 1
        if not self.picked:  # it fits on no other rank either
            return None
        last = first + self._longest(lambda x: self._with_whole(first + x - 1) <= limit, self.end - first)
        return last - 1

    def _strands(self, pick: int) -> bool:
        """Return whether no other part can give the work that ``pick`` leaves to do."""
        tokens = self.tokens - self._size(pick)
        heaviest = len(self.starts) - 1
        while heaviest in self.picked:
            heaviest -= 1
        if not tokens or heaviest == pick:
            return False
        stop = self.stops[heaviest]
        reached = causal_pairs(stop - min(tokens, self._size(heaviest)), stop)
        return reached < self.work - self.slack - self._pairs(pick)

    def _to_cut(self, first: int) -> int:
        """Return the lightest part whose tail can give the work that is missing."""
        last = len(self.starts) - 1

        def lacks(index: int) -> bool:
            return index in self.picked or self._with_tail(index, self._room(index)) < self.work

        found = first + self._longest(lambda x: lacks(first + x - 1), self.end - first)
        while found < last and lacks(found):
            found += 1
        while found in self.picked:
            found -= 1
        return found

    def _take(self, cut: int | None, tail: int) -> list[Piece]:
        """Take the picked parts, the tail, the lightest parts, and heads for the rest."""
        documents, starts, stops = self.pool.documents, self.starts, self.stops
        whole, missing = self._lightest(self.tokens - tail, self.end if cut is None else min(cut, self.end))
        pieces = [Piece(documents[index], starts[index], stops[index]) for index in self.picked]
        # As Piece._make, which takes a fifth of the time to plan.
        pieces += map(tuple.__new__, repeat(Piece), zip(documents[:whole], starts, stops))  # noqa: B905
        touched = set(self.picked)
        head = self._head(cut, whole, missing, tail) if missing else None
        if cut is not None:
            touched.add(cut)
            if tail:
                pieces.append(Piece(documents[cut], stops[cut] - tail, stops[cut]))
            stops[cut] -= tail
        for index in self.picked:
            starts[index] = stops[index]
        following = iter(range(whole, len(starts)))
        while missing:
            index = next(following) if head is None else head
            head = None
            taken = min(missing, self._size(index))
            if not taken:
                continue
            pieces.append(Piece(documents[index], starts[index], starts[index] + taken))
            missing -= taken
            if index == whole and index not in touched and taken < self._size(index):
                self.pool.shorten(index, taken)
            else:
                touched.add(index)
                starts[index] += taken
        self.pool.remove(whole, touched)
        return pieces

    def _lightest(self, tokens: int, end: int) -> tuple[int, int]:
        """Return how many of the lightest parts fit, and the tokens left over."""
        tokens += self.tokens_before[0]
        count = bisect_right(self.tokens_before, tokens, 0, end + 1) - 1
        return count, tokens - self.tokens_before[count]

    def _work_of(self, first: int) -> int:
        """Return the work of the ``first`` parts."""
        return self.work_before[first] - self.work_before[0]

    def _with_whole(self, index: int) -> float:
        """Return the work of a whole part and the lightest fill beside it."""
        tokens = self.tokens - self._size(index)
        if tokens < 0:
            return float("inf")
        whole, missing = self._lightest(tokens, index)
        if missing and whole >= index:
            return float("inf")
        head = causal_pairs(self.starts[whole], self.starts[whole] + missing) if missing else 0
        return self._pairs(index) + self._work_of(whole) + head

    def _with_tail(self, index: int, tail: int) -> float:
        """Return the work of a part's tail and the lightest fill beside it."""
        whole, missing = self._lightest(self.tokens - tail, min(index, self.end))
        work = causal_pairs(self.stops[index] - tail, self.stops[index]) + self._work_of(whole)
        if not missing:
            return work
        head = self._head(index, whole, missing, tail)
        if head is None:
            return work + missing * self.stops[-1]
        return work + causal_pairs(self.starts[head], self.starts[head] + missing)

    def _head(self, cut: int | None, first: int, tokens: int, tail: int) -> int | None:
        """Return a part whose head fills up: the cut one, to save rows, or a light one."""
        own = cut is not None and self._size(cut) - tail >= tokens
        if cut is not None and own:
            further = self.starts[cut] - self.starts[first]
            if first >= cut or further * self.slope <= self.stops[cut] - tail:
                return cut
        for index in range(first, len(self.starts)):
            if index != cut and index not in self.picked and self._size(index) >= tokens:
                return index
        return cut if own else None

    def _room(self, index: int) -> int:
        return min(self.tokens, self._size(index))

    def _size(self, index: int) -> int:
        return self.stops[index] - self.starts[index]

    def _pairs(self, index: int) -> int:
        return self.work_before[index + 1] - self.work_before[index]

    @staticmethod
    def _longest(holds: Callable[[int], bool], limit: int) -> int:
        """Return the largest number up to ``limit`` that holds, by bisection, or 0."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if holds(middle):
                low = middle
            else:
                high = middle - 1
        return low
