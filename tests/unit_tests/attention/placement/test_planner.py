"""Placement of a pack's documents: equal tokens and nearly equal work.

Few rows have to be sent.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packs_bound import lower_bound, rows_received
from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.placement.planner import Piece, Placement, causal_pairs, place
from megatron_cp.attention.tiles import Mask, seen
from megatron_cp.dynamic_cp.distributions import sample_lengths

packs = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 300)), min_size=1, max_size=12)


def work_of(placement: Placement) -> list[int]:
    return [sum(causal_pairs(start, stop) for _, start, stop in pieces) for pieces in placement]


@given(packs, st.integers(1, 9))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_token_is_placed_once_and_ranks_have_equal_tokens(lengths, size):
    placement = place(lengths, size)
    tokens = [(p.document, token) for pieces in placement for p in pieces for token in range(p.start, p.stop)]
    assert sorted(tokens) == [(document, token) for document, n in enumerate(lengths) for token in range(n)]
    counts = [sum(piece.stop - piece.start for piece in pieces) for pieces in placement]
    assert len(counts) == size and max(counts) - min(counts) <= 1


@given(packs, st.integers(1, 6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_fewer_rows_are_received_than_the_bound(lengths, size):
    placement = place(lengths, size)
    assert rows_received(placement) >= lower_bound(lengths, size, max(work_of(placement)))


@given(packs, st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_layout_has_the_placed_tokens_and_sends_the_counted_rows(lengths, size, multiple):
    layout, placement = PlacedLayout.balanced(lengths, size, multiple), place(lengths, size)
    assert layout.rows % multiple == 0 and layout.rows * size >= sum(lengths)
    offsets = [0, *itertools.accumulate(lengths)]
    for rank, pieces in enumerate(placement):
        expected = [offsets[p.document] + token for p in sorted(pieces) for token in range(p.start, p.stop)]
        assert layout.tokens(rank).tolist() == expected + [-1] * (layout.rows - len(expected))
    pairs = [(q, k) for q in range(size) for k in range(size) if q != k]
    sent = sum(span.length for q, k in pairs for span in seen(layout, q, k, Mask(None, 0)))
    assert sent == rows_received(placement)
    joined = layout.resized(1)
    assert joined.tokens(0).tolist() == [token for rank in range(size) for token in layout.tokens(rank).tolist()]


def every_placement(lengths: Sequence[int], size: int) -> Iterator[Placement]:
    """Yield all ways to give ranks equal tokens, as a naive twin."""
    tokens = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    for ranks in itertools.product(range(size), repeat=len(tokens)):
        placement: list[list[Piece]] = [[] for _ in range(size)]
        for (document, token), rank in zip(tokens, ranks, strict=True):
            placement[rank].append(Piece(document, token, token + 1))
        if max(map(len, placement)) - min(map(len, placement)) <= 1:
            yield tuple(map(tuple, placement))


@pytest.mark.parametrize(
    ("lengths", "size"), [([8], 2), ([5, 3], 2), ([6, 1, 1, 1], 2), ([3, 3, 2], 2), ([4, 3], 3), ([2, 2, 2], 3)]
)
def test_small_packs_against_all_placements(lengths, size):
    found = place(lengths, size)
    slowest, rows = max(work_of(found)), rows_received(found)
    every = [(max(work_of(each)), rows_received(each)) for each in every_placement(lengths, size)]
    fewest = min(received for work, received in every if work <= slowest)
    assert lower_bound(lengths, size, slowest) <= fewest <= rows <= fewest + 2
    assert slowest <= min(work for work, _ in every) + max(lengths)


@pytest.mark.parametrize("lengths", [[1024], [4096]])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_document_is_cut_as_in_zigzag(lengths, size):
    """The bound is reached: the middle of the document is on the last rank."""
    placement = place(lengths, size)
    assert all(len(pieces) <= 2 for pieces in placement)
    assert rows_received(placement) <= 1.01 * lower_bound(lengths, size, max(work_of(placement)))


def test_documents_that_fit_are_not_cut():
    assert sorted(map(len, place([100] * 64, 16))) == [4] * 16
    assert rows_received(place([100] * 64 + [50] * 32, 16)) == 0


def drawn_packs(name: str, multiples: Sequence[int], count: int) -> Iterator[list[int]]:
    """Draw packs of several times the mean length; cut the last document off."""
    lengths = sample_lengths(name, 4000, 32768, seed=1)
    rng = np.random.default_rng(0)
    for multiple, _ in itertools.product(multiples, range(count)):
        room, pack = int(lengths.mean() * multiple), []
        while room:
            pack.append(min(room, int(rng.choice(lengths))))
            room -= pack[-1]
        yield pack


@pytest.mark.parametrize("name", ["wikipedia", "documents", "lognormal", "pareto"])
def test_packs_of_real_and_synthetic_lengths_are_balanced(name):
    """Work within 3 % of the mean, and fewer than two fifths of zigzag's rows."""
    ratios, rows, zigzag = [], 0, 0.0
    for pack in drawn_packs(name, (4, 8, 16, 32, 64), 2):
        for size in (2, 3, 4, 8, 16):
            placement = place(pack, size)
            work = work_of(placement)
            ratios.append(max(work) * size / sum(work))
            rows += rows_received(placement)
            zigzag += sum(pack) * 0.75 * (size - 1)
    assert math.exp(np.mean(np.log(ratios))) <= 1.01 and max(ratios) <= 1.06
    assert rows <= 0.4 * zigzag


def test_sizes_and_lengths_are_checked():
    with pytest.raises(ValueError, match="size=0"):
        place([1], 0)
    with pytest.raises(ValueError, match="negative"):
        place([-1], 1)
