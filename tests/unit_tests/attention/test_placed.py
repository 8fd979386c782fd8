"""Packs in pieces: every transport against the answer of one rank in float64.

The rows that are sent are checked as well.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_cp.attention import context_parallel_attention
from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.sharding import RowSpan
from megatron_cp.attention.tiles import Mask, seen
from tests.ranks import run_ranks
from tests.unit_tests.attention.counting import SENT, counting_group
from tests.unit_tests.attention.harness import COMM_TYPES, Case, run_cases
from tests.unit_tests.attention.test_exactness import DRAWN_TOLERANCE

KV, DIM = 2, 8


def random_placement(draw: random.Random, size: int) -> PlacedLayout:
    """Cut documents anywhere, into pieces on any ranks with padding between them."""
    lengths = tuple(draw.choice([0, 1, draw.randint(1, 90)]) for _ in range(draw.randint(1, 6)))
    ranks: list[list[RowSpan]] = [[] for _ in range(size)]
    ends = [0] * size
    pieces = []
    for document, length in enumerate(lengths):
        cuts = sorted({0, length, *(draw.randint(0, length) for _ in range(draw.choice([0, 1, 4])))})
        pieces += [(document, start, stop) for start, stop in itertools.pairwise(cuts)]
    draw.shuffle(pieces)
    for document, start, stop in pieces:
        rank = draw.randrange(size)
        row = ends[rank] + draw.choice([0, 0, 3])
        ranks[rank].append(RowSpan(row, stop - start, start, document))
        ends[rank] = row + stop - start
    return PlacedLayout(lengths, tuple(map(tuple, ranks)), max(ends) + draw.randint(0, 3))


def random_cases(seed: int, count: int, size: int) -> list[tuple[str, Case]]:
    draw = random.Random(seed)
    cases = []
    for _ in range(count):
        placed = random_placement(draw, size)
        if draw.random() < 0.5:
            placed = PlacedLayout.balanced([draw.randint(0, 120) for _ in range(draw.randint(1, 9))], size)
        window = (draw.randint(-1, 60), draw.randint(-1, 60)) if draw.random() < 0.3 else None
        case = Case.of_placed(
            placed,
            heads=4 if size % 3 else 12,
            kv_heads=draw.choice([1, 2, 4]),
            qk_dim=draw.choice([8, 16]),
            causal=draw.random() < 0.7,
            window=window,
            offset=draw.random() < 0.3,
            dtype=draw.choice([torch.float64, torch.float32]),
            seed=draw.randint(0, 1000),
        )
        cases += [(name, case) for name in COMM_TYPES if name != "a2a" or case.heads % size == 0]
    return cases


@pytest.mark.parametrize(("size", "a2a_size"), [(2, 1), (3, 1), (4, 2), (6, 2)])
def test_random_placements_are_exact(size, a2a_size):
    chosen = random_cases(size, 12, size)
    for errors in run_ranks(run_cases, size, chosen, a2a_size):
        for (comm_type, case), error in zip(chosen, errors, strict=True):
            assert error <= DRAWN_TOLERANCE[case.dtype], (comm_type, case, error)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "a2a_size"), [(3, 3), (4, 2), (6, 3), (8, 4)])
def test_two_hundred_random_placements_are_exact(size, a2a_size):
    chosen = random_cases(100 + size, 50, size)
    for errors in run_ranks(run_cases, size, chosen, a2a_size, timeout=600):
        for (comm_type, case), error in zip(chosen, errors, strict=True):
            assert error <= DRAWN_TOLERANCE[case.dtype], (comm_type, case, error)


def _count(comm_type: str, placed: PlacedLayout) -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = counting_group(list(range(size)))
    q, k, v = (torch.randn(placed.rows, heads, DIM, requires_grad=True) for heads in (4, KV, KV))
    SENT.clear()
    out = context_parallel_attention(q, k, v, group=group, comm_type=comm_type, placed=placed)
    forward = SENT.total()
    out.backward(torch.randn_like(out))
    rows = sum(span.length for r in range(size) if r != rank for span in seen(placed, r, rank, Mask(None, 0)))
    received = sum(span.length for r in range(size) if r != rank for span in seen(placed, rank, r, Mask(None, 0)))
    width = 2 * KV * DIM * 4
    assert forward == rows * width
    return SENT.total() - forward, (rows + received) * width


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_only_rows_that_are_seen_are_sent(comm_type):
    """Keys and values go forward; backward these again, and the rows' gradients."""
    placed = PlacedLayout.balanced([70, 10, 9, 8, 7, 6, 5, 5], 4)
    for backward, expected in run_ranks(_count, 4, comm_type, placed):
        assert backward == expected


def test_whole_documents_send_nothing():
    placed = PlacedLayout.balanced([30, 30, 30], 3)
    assert run_ranks(_count, 3, "p2p", placed) == [(0, 0)] * 3


def _refused() -> list[str]:
    placed = PlacedLayout.balanced([5, 6], 2)
    q = torch.randn(placed.rows, 4, DIM)
    found = []
    for options in (
        {"placed": replace(placed, pieces=placed.pieces * 2)},
        {"placed": replace(placed, rows=99)},
        {"placed": placed, "cu_seqlens": torch.tensor([0, 11])},
    ):
        with pytest.raises(ValueError) as error:
            context_parallel_attention(q, q, q, group=dist.group.WORLD, **options)
        found.append(str(error.value))
    return found


def test_a_layout_of_other_sizes_is_refused():
    for ranks, rows, both in run_ranks(_refused, 2):
        assert "6 rows on each of 4 ranks" in ranks and "99 rows on each of 2 ranks" in rows
        assert "both given" in both
