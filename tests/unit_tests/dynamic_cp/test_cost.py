import dataclasses

import numpy as np
import pytest

from benchmarks.packs import drawn_pack
from benchmarks.packs_bound import rows_received
from megatron_cp.attention.placement.planner import place
from megatron_cp.dynamic_cp import PRESETS, CostModel


def formula(cost, lengths, c):
    """Compute the documented formula."""
    attention = sum(cost.quadratic * s * s / c * (1 + cost.small_tile * c / s) for s in lengths)
    total = cost.per_microbatch + attention + sum(cost.linear * s / c for s in lengths)
    if c > 1:
        kv = cost.kv_intra if c <= cost.ranks_per_node else cost.kv_inter
        total += max(0, kv * sum(lengths) * (c - 1) / c - cost.overlap * attention) + (c - 1) * cost.ring_step
    calls = c + 2 if c > 1 and cost.transport == "p2p" else 1
    return total + cost.per_sample * len(lengths) * calls


@pytest.mark.parametrize("name", [name for name, cost in PRESETS.items() if cost.transport == "p2p"])
@pytest.mark.parametrize("c", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("lengths", [[300], [100_000], [8000, 120, 7, 3000], [500] * 40])
def test_seconds_are_the_documented_formula(name, c, lengths):
    cost = PRESETS[name]
    assert cost.seconds(lengths, c) == pytest.approx(formula(cost, lengths, c), rel=1e-12)
    each = [cost.seconds([s], c) for s in lengths]
    assert cost.sample_seconds(np.array(lengths), c) == pytest.approx(np.array(each), rel=1e-12)


@pytest.mark.parametrize("c", [1, 2, 8])
@pytest.mark.parametrize("transport", ["p2p", "a2a"])
def test_samples_with_a_kernel_call_of_their_own(c, transport):
    """A sample takes calls on the ring's diagonal, and one for each other rank.

    There are two calls on the diagonal and one between them.
    """
    cost = CostModel(1e-3, 1e-9, 1e-6, transport=transport, per_sample=1e-4)
    lengths = [300, 40, 7]
    assert cost.seconds(lengths, c) == pytest.approx(formula(cost, lengths, c), rel=1e-12)
    each = [cost.seconds([s], c) for s in lengths]
    assert cost.sample_seconds(np.array(lengths), c) == pytest.approx(np.array(each), rel=1e-12)


def in_pieces(cost, lengths, c):
    """Compute the documented formula for packs in pieces."""
    cut = sum(s**3 for s in lengths) / sum(s * s for s in lengths)  # tokens
    tiles = cost.small_tile * (cut + (sum(lengths) - cut) / c)
    attention = cost.quadratic * (sum(s * s for s in lengths) / c + tiles)
    kv = cost.kv_intra if c <= cost.ranks_per_node else cost.kv_inter
    moved = max(0, kv * cut * (c - 1) / c - cost.overlap * attention) + (c - 1) * cost.ring_step
    calls = c + 2 + (len(lengths) - 1) / c
    return cost.per_microbatch + attention + cost.linear * sum(lengths) / c + moved + cost.per_sample * calls


@pytest.mark.parametrize("c", [2, 8, 16])
@pytest.mark.parametrize("lengths", [[300], [100_000], [8000, 120, 7, 3000], [500] * 40])
def test_packs_in_pieces(c, lengths):
    cost = dataclasses.replace(PRESETS["h100_8b"], placement="balanced", per_sample=1e-4)
    assert cost.seconds(lengths, c) == pytest.approx(in_pieces(cost, lengths, c), rel=1e-12)
    zigzag = dataclasses.replace(cost, placement="zigzag")
    if len(lengths) == 1:  # cut over all ranks either way
        assert cost.seconds(lengths, c) == pytest.approx(zigzag.seconds(lengths, c), rel=1e-12)
        assert cost.sample_seconds(lengths, c) == pytest.approx(zigzag.sample_seconds(lengths, c), rel=1e-12)
    else:
        assert cost.seconds(lengths, c) < zigzag.seconds(lengths, c)
    whole = dataclasses.replace(cost, transport="a2a")  # an all-to-all sends all tokens
    assert whole.seconds(lengths, c) == dataclasses.replace(whole, placement="zigzag").seconds(lengths, c)


@pytest.mark.parametrize("placement", ["zigzag", "balanced"])
def test_a_small_sample_adds_its_share(placement):
    cost, pack = dataclasses.replace(PRESETS["h100_8b"], placement=placement, kv_intra=0.0), [3000] * 40
    added = cost.seconds([*pack, 3000], 8) - cost.seconds(pack, 8)
    assert cost.added_seconds([3000], 8)[0] == pytest.approx(added, rel=1e-6)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_cut_tokens_are_near_those_of_real_plans(size):
    """Compared are the rows that ranks receive, summed over packs of many sizes."""
    received, slowest, modelled = 0.0, 0.0, 0.0
    for name in ("wikipedia", "documents", "lognormal", "pareto"):
        for seed, tokens in enumerate((12_000, 24_000, 48_000, 96_000)):
            pack = np.array(drawn_pack(name, tokens, seed, 65_536))
            rows = [rows_received([pieces]) for pieces in place(pack.tolist(), size)]
            received, slowest = received + sum(rows) / size, slowest + max(rows)
            modelled += float((pack**3).sum() / (pack @ pack)) * (size - 1) / size
    assert 0.5 * modelled < received < modelled < slowest * 1.1 < 1.5 * modelled


def test_ideal_is_one_rank_without_overhead():
    cost = PRESETS["h100_8b"]
    bare = dataclasses.replace(cost, per_microbatch=0.0)
    assert cost.ideal_seconds([5000, 70]) == pytest.approx(bare.seconds([5000, 70], 1))


def test_all_to_all_moves_a_share_in_one_step_and_hides_nothing():
    cost, lengths, c = dataclasses.replace(PRESETS["h100_8b"], transport="a2a"), [120_000, 4000], 8
    compute = formula(dataclasses.replace(cost, kv_intra=0, ring_step=0), lengths, c)
    moved = cost.kv_intra * sum(lengths) * (c - 1) / c / c
    assert cost.seconds(lengths, c) == pytest.approx(compute + moved + cost.ring_step)


def test_a_schedule_adapts_to_the_topology():
    """Communication inside the node is cheap, so crossing nodes must cost."""
    cost = PRESETS["a100_mha_slownet"]
    assert cost.seconds([60_000], 16) > cost.seconds([60_000], 8)


def test_a_group_has_ranks():
    cost = PRESETS["h100_8b"]
    assert cost.seconds([500], c=2) == cost.seconds([500], 2)
    for c in (0, -2):
        with pytest.raises(ValueError, match=f"c={c}: a group has at least 1 rank"):
            cost.seconds([500], c)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quadratic": -1.0}, "quadratic=-1.0"),
        ({"linear": float("nan")}, "linear=nan"),
        ({"overlap": 1.5}, "overlap=1.5"),
        ({"overlap": float("nan")}, "overlap=nan"),
        *(({name: float("inf")}, f"CostModel.{name}=inf") for name in ("per_microbatch", "linear", "kv_inter")),
        ({"ranks_per_node": float("inf")}, "ranks_per_node=inf"),
        ({"ranks_per_node": 0}, "ranks_per_node=0"),
        ({"transport": "smoke"}, "transport='smoke'"),
        ({"quadratic": 0.0, "linear": 0.0}, "both 0"),
    ],
)
def test_impossible_costs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PRESETS["h100_8b"], **change)


def test_the_contract_of_positional_arguments():
    cost = CostModel(0.015, 2.6e-9, 1.2e-4, 256, 1.3e-6, 8.7e-6, 1.2e-3, 0.9, 8)
    assert cost == PRESETS["h100_8b"]
