"""Buckets of packs: the best ones, few on real lengths, masked padding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.dynamic_cp import CostModel, Schedule, schedule, schedule_fixed_cp
from megatron_cp.dynamic_cp.analysis.report import padding_fraction, rank_tokens
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.dynamic_cp.runtime.packing import HostPack, lay_out
from megatron_cp.dynamic_cp.token_buckets import fit_buckets, fit_to_batches
from megatron_cp.dynamic_cp.types import Group, in_buckets, padded_tokens
from megatron_cp.estimate.cost_presets import cost_preset
from megatron_cp.training.held_out.counts import _samples_of_tokens

LONGEST, RANKS, SAMPLES = 131_072, 8, 1024


def fewest_padded_tokens(tokens: list[int], weights: list[int], number: int, most: int) -> int:
    """Try all sets of buckets that include the largest number of tokens."""
    others = sorted(set(tokens) - {most})
    return min(
        int(np.array(weights) @ in_buckets(tokens, (*chosen, most)))
        for count in range(min(number, len(others) + 1))
        for chosen in combinations(others, count)
    )


@given(
    packs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=9),
    number=st.integers(1, 5),
    above=st.integers(0, 30),
    unit=st.sampled_from([1, 2, 8]),
)
def test_no_other_buckets_pad_less(packs: list[tuple[int, int]], number: int, above: int, unit: int) -> None:
    tokens, weights = [unit * each for each, _ in packs], [weight for _, weight in packs]
    limit = max(tokens) + above
    found = fit_buckets(tokens, weights, number, limit, unit)
    assert len(found) <= number and list(found) == sorted(set(found)) and found[-1] == limit // unit * unit
    assert not any(each % unit for each in found)
    assert weights @ in_buckets(tokens, found) == fewest_padded_tokens(tokens, weights, number, found[-1])


def test_buckets_of_many_numbers_are_within_a_thousandth_of_the_limit() -> None:
    tokens = 2 * np.random.default_rng(1).integers(1, 50_000, 3000)
    found = fit_buckets(tokens, np.ones(3000), 5000, 100_000, 2)
    assert len(found) <= 1024 and (in_buckets(tokens, found) - tokens).max() < 100_000 / 1000


def batches(name: str, cost: CostModel, cp_size: int | None, seeds: range) -> Iterator[tuple]:
    """Yield scheduled batches; ``cp_size`` None: dynamic CP."""
    limit = LONGEST // (cp_size or RANKS)
    for seed in seeds:
        lengths = sample_lengths(name, SAMPLES, LONGEST, seed)
        if cp_size is None:
            yield schedule(lengths, RANKS, limit, cost=cost), lengths
        else:
            yield schedule_fixed_cp(lengths, RANKS, limit, cp_size=cp_size, cost=cost), lengths


@pytest.mark.parametrize("cp_size", [None, 8])
@pytest.mark.parametrize("name", ["documents", "wikipedia"])
def test_sixteen_buckets_pad_real_lengths_by_two_percent(name: str, cp_size: int | None) -> None:
    """Later batches count too.

    ``benchmarks/packed_shapes.py`` has more cases.
    """
    cost, limit = cost_preset("h100_8b"), LONGEST // (cp_size or RANKS)
    fit = fit_to_batches(batches(name, cost, cp_size, range(128)), 16, limit, placement="zigzag", lockstep=False)
    assert len(fit.tokens) <= 16 < fit.distinct and fit.padding <= 0.02
    others = [rank_tokens(made, of, "zigzag") for made, of in batches(name, cost, cp_size, range(1000, 1012))]
    tokens, ranks = map(np.concatenate, zip(*others, strict=True))
    assert ranks @ in_buckets(tokens, fit.tokens) <= 1.02 * (ranks @ tokens)


def test_dummies_of_ranks_in_lockstep_are_fitted_too() -> None:
    lengths = [40, 40, 40, 40, 40]
    made = [(Schedule(2, 64, [[Group((0,), (0, 1, 2, 3, 4))]], 2), lengths)]
    apart = fit_to_batches(made, 3, 256, placement="zigzag", lockstep=False)
    dummies = fit_to_batches(made, 3, 256, placement="zigzag", lockstep=True)
    assert (apart.tokens, dummies.tokens) == ((200, 256), (4, 200, 256))


def packs(placement: str, size: int) -> list[HostPack]:
    starts = [1, 14, 54, 85]
    samples = [
        {"tokens": torch.arange(a, b), "labels": torch.arange(a, b) + 1000, "loss_mask": torch.ones(b - a)}
        for a, b in pairwise(starts)
    ]
    common = {"placement": placement, "token_buckets": (8, 128), "sequence_parallel_size": 2}
    return [lay_out(samples, rank, size, **common) for rank in range(size)]  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("placement", ["zigzag", "balanced"])
def test_padding_to_a_bucket_is_masked_and_belongs_to_no_sample(placement: str, size: int) -> None:
    lengths, tokens = (13, 40, 31), []
    for rank, pack in enumerate(packs(placement, size)):
        rows = {key: value[0] for key, value in pack.tensors.items()}
        real = ~rows["padding_mask"]
        assert pack.lengths == lengths and pack.padded_starts[-1] == 128 * size and len(real) == 128
        assert not any(rows[key][~real].any() for key in ("tokens", "labels", "loss_mask", "position_ids"))
        tokens += rows["tokens"][real].tolist()
        owners = _samples_of_tokens(pack, rank)
        assert owners.max() == 2
        assert [int((owners[real] == i).sum()) for i in range(3)] == [
            int(((rows["tokens"] >= first) & (rows["tokens"] < stop)).sum())
            for first, stop in ((1, 14), (14, 54), (54, 85))
        ]
    assert sorted(tokens) == list(range(1, 85))
    bucketed = Schedule(size, 128, [[Group(tuple(range(size)), (0, 1, 2))]], 2, (8, 128))
    assert padding_fraction(bucketed, lengths, placement) == pytest.approx(128 * size / 84 - 1)
    assert padded_tokens(lengths, size, 2, placement=placement, token_buckets=(8, 128)) == 128 * size


def test_a_pack_above_the_largest_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a pack has 84 tokens a rank, more than the largest bucket \(80\)"):
        in_buckets([12, 84], (16, 80))
