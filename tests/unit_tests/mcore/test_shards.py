"""Shards are gathered and summed as torch.distributed's collectives do it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.mcore import shards
from tests.ranks import run_ranks


def whole_of(rank: int, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return [ranks * 35, 3] of small whole numbers: sums are exact in every dtype."""
    drawn = torch.randint(-8, 8, (ranks * 35, 3), generator=torch.Generator().manual_seed(rank))
    return drawn.to(dtype)


def check(dtype: torch.dtype, in_place: bool, piece: int) -> None:
    shards.PIECE = piece
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    place = slice(rank * 35, (rank + 1) * 35)

    whole = whole_of(rank, dtype, ranks)
    own = whole[place] if in_place else torch.empty(35, 3, dtype=dtype)
    kept = whole.clone()
    shards.Exchange(shards.sum_shards(own, whole, group)).wait()
    assert torch.equal(own, sum(whole_of(each, dtype, ranks) for each in range(ranks))[place])  # type: ignore[index]
    others = torch.ones(len(whole), dtype=torch.bool)
    others[place] = not in_place
    assert torch.equal(whole[others], kept[others])

    whole = torch.zeros(ranks * 35, 3, dtype=dtype)
    own = whole[place] if in_place else torch.empty(35, 3, dtype=dtype)
    own.copy_(whole_of(rank, dtype, ranks)[place])
    shards.Exchange(shards.gather_shards(whole, own, group)).wait()
    assert torch.equal(whole, torch.cat([whole_of(each, dtype, ranks)[35 * each :][:35] for each in range(ranks)]))


def check_all(in_place: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for piece in (shards.PIECE, 100, 1):
            check(dtype, in_place, piece)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
def test_shards(ranks: int, in_place: bool) -> None:
    run_ranks(check_all, ranks, in_place)


def overlapping() -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    whole, gathered = torch.arange(6.0 * ranks) * (rank + 1), torch.empty(6 * ranks)
    own = torch.empty(6)
    total = shards.Exchange(shards.sum_shards(own, whole, group))
    pieces = shards.Exchange(shards.gather_shards(gathered, torch.full((6,), float(rank)), group))
    pieces.wait(), total.wait()
    assert gathered.tolist() == [float(each) for each in range(ranks) for _ in range(6)]
    assert torch.equal(own, torch.arange(6.0 * ranks)[rank * 6 :][:6] * sum(range(1, ranks + 1)))


def test_exchanges_may_overlap() -> None:
    run_ranks(overlapping, 3)
