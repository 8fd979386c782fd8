"""Packed training as configured equals one rank's, sample by sample.

It is in float32, with long tails of lengths.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import packed_runs
from tests.packed_runs import (
    BALANCED,
    DYNAMIC,
    LONGEST,
    Losses,
    lengths_file,
    one_by_one,
    packed_config,
    packed_losses,
    packs_of,
)
from tests.ranks import run_ranks
from tests.training_runs import worst_difference
from tests.unit_tests.models.gemma3 import GEMMA3
from tests.unit_tests.models.hybrids import FURTHER, HYBRID, HYBRID_EXPERTS
from tests.unit_tests.training.layouts.cases import CP2, CP4, PP2, SP, TP2, VPP2
from tests.unit_tests.training.layouts.test_model_variants import (
    BIASED,
    CLASSIC,
    EP2,
    ETP1,
    FULL,
    HEAD_GROUPS,
    MIXED_LAYERS,
    MLA,
    MOE,
    SHARED,
    SHARPER,
    SIGMOID,
    YARN,
)

TOLERANCE = 2e-6
MTP = {"model__mtp_num_layers": 2, "model__mtp_loss_scaling_factor": 0.5}
DECENTRALIZED = {"dist__use_decentralized_pg": True}
TWO_LEVELS = {"model__cp_comm_type": "a2a+p2p", "model__hierarchical_context_parallel_sizes": [2, 1]}
PLACED = {"model__packed_placement": "balanced"}
BUCKETS = {"model__packed_shape_buckets": 3}
slow = pytest.mark.slow


def transport(name: str) -> dict[str, Any]:
    return {"model__cp_comm_type": name}


def per_rank(tokens: int) -> dict[str, Any]:
    return {"model__max_seqlen_per_dp_cp_rank": tokens}


# Name -> ranks, model, layout.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "2 ranks": (2, {}, DYNAMIC | per_rank(64)),
    "3 ranks": (3, {}, DYNAMIC | per_rank(44)),
    "4 ranks, cp2": (4, {}, DYNAMIC | CP2 | per_rank(32)),
    "tp2 sp": (4, {}, DYNAMIC | TP2 | SP | per_rank(64)),
    "pp2 vpp2": (4, {}, DYNAMIC | PP2 | VPP2 | per_rank(64)),
    "4 ranks, dp_balanced cp2": (4, {}, BALANCED | CP2),
    "4 ranks, dp_balanced cp4": (4, {}, BALANCED | CP4),
    "4 ranks, decentralized, groups at the start": (
        4,
        {},
        DYNAMIC | CP2 | DECENTRALIZED | per_rank(32) | {"dist__dynamic_groups_at_start": True},
    ),
    "4 ranks, default limit": (4, {}, DYNAMIC | CP4),
    "yarn, 4 ranks, decentralized": (4, YARN, DYNAMIC | CP2 | DECENTRALIZED | per_rank(32)),
    "6 ranks": (6, {}, DYNAMIC | per_rank(32)),
    "6 ranks, groups of 2 and more": (
        6,
        {},
        DYNAMIC | per_rank(32) | {"model__min_dynamic_context_parallel_size": 2},
    ),
    "8 ranks": (8, {}, DYNAMIC | per_rank(16)),
    "8 ranks, dp_balanced cp2 pp2": (8, {}, BALANCED | CP2 | PP2),
    "pp2": (4, {}, DYNAMIC | PP2 | per_rank(64)),
    "pp2 vpp2, messages not overlapped": (
        4,
        {},
        DYNAMIC | PP2 | VPP2 | per_rank(64) | {"model__overlap_p2p_comm": False},
    ),
    "pp2 decentralized": (8, {}, DYNAMIC | PP2 | CP2 | DECENTRALIZED | per_rank(32)),
    "tp2": (4, {}, DYNAMIC | TP2 | per_rank(64)),
    "tp2 sp pp2": (8, {}, DYNAMIC | TP2 | SP | PP2 | per_rank(64)),
    "4 ranks, a2a, a ring where 3 ranks share 8 heads": (
        4,
        {},
        DYNAMIC | CP2 | per_rank(32) | {"model__cp_comm_type": "a2a"},
    ),
    "4 ranks, all_gather": (4, {}, DYNAMIC | CP2 | per_rank(32) | {"model__cp_comm_type": "all_gather"}),
    "8 ranks, a2a 2 inside and p2p across": (8, {}, DYNAMIC | CP2 | TWO_LEVELS | per_rank(16)),
    "4 ranks, a2a+p2p in one node": (4, {}, DYNAMIC | per_rank(32) | {"model__cp_comm_type": "a2a+p2p"}),
    "groups of heads, 4 ranks, a2a": (
        4,
        {},
        DYNAMIC | CP2 | per_rank(32) | HEAD_GROUPS | {"model__cp_comm_type": "a2a"},
    ),
    "groups of heads, yarn, full recomputation, tp2 sp": (
        4,
        YARN,
        DYNAMIC | TP2 | SP | FULL | HEAD_GROUPS | per_rank(64),
    ),
    "full recomputation": (4, {}, DYNAMIC | FULL | per_rank(32)),
    "full recomputation, pp2": (4, {}, DYNAMIC | PP2 | FULL | per_rank(64)),
    "selective recomputation": (4, {}, DYNAMIC | per_rank(32) | {"model__recompute_granularity": "selective"}),
    "learned positions": (4, CLASSIC, DYNAMIC | per_rank(32)),
    "latent attention": (4, MLA, DYNAMIC | CP2 | per_rank(32)),
    "latent attention with yarn": (4, MLA | YARN | SHARPER, DYNAMIC | CP2 | per_rank(32)),
    "latent attention, full recomputation": (4, MLA, DYNAMIC | CP2 | FULL | per_rank(32)),
    "hybrid": (4, HYBRID, DYNAMIC | per_rank(32)),
    "hybrid, two tokens further, tp2 sp": (4, FURTHER, DYNAMIC | TP2 | SP | per_rank(64)),
    "hybrid, two tokens further, pp2 vpp2": (4, FURTHER, DYNAMIC | PP2 | VPP2 | per_rank(64)),
    "hybrid, pp2": (4, HYBRID, DYNAMIC | PP2 | per_rank(64)),
    "hybrid with experts": (4, HYBRID_EXPERTS, DYNAMIC | per_rank(32)),
    "hybrid with experts, ep2, decentralized": (4, HYBRID_EXPERTS, DYNAMIC | CP2 | EP2 | DECENTRALIZED | per_rank(32)),
    "hybrid with experts, ep2, whole in tp2 sp": (4, HYBRID_EXPERTS, DYNAMIC | TP2 | SP | EP2 | ETP1 | per_rank(64)),
    "hybrid with experts, ep2 cp2, whole in tp2 sp": (
        8,
        HYBRID_EXPERTS,
        DYNAMIC | CP2 | TP2 | SP | EP2 | ETP1 | per_rank(32),
    ),
    "hybrid with experts, pp2 vpp2 ep2": (4, HYBRID_EXPERTS, DYNAMIC | PP2 | VPP2 | EP2 | per_rank(64)),
    "hybrid with experts, full recomputation, ep2": (4, HYBRID_EXPERTS, DYNAMIC | EP2 | FULL | per_rank(32)),
    "hybrid with experts in fewer dimensions, one token further, ep2": (
        4,
        HYBRID_EXPERTS
        | {"model__hybrid_layer_pattern": "ME*E/*E", "model__mtp_num_layers": 1, "model__moe_latent_size": 24},
        DYNAMIC | EP2 | per_rank(32),
    ),
    "hybrid with experts, dp_balanced cp2 ep2": (4, HYBRID_EXPERTS, BALANCED | CP2 | EP2),
    "two tokens further": (4, MTP, DYNAMIC | CP2 | per_rank(32)),
    "two tokens further, tp2 sp": (4, MTP, DYNAMIC | TP2 | SP | per_rank(64)),
    "experts": (4, MOE, DYNAMIC | per_rank(32)),
    "experts, ep2": (4, MOE, DYNAMIC | per_rank(32) | EP2),
    "shared experts, ep2": (4, SHARED, DYNAMIC | per_rank(32) | EP2),
    "sigmoid router with a z-loss": (4, SIGMOID, DYNAMIC | per_rank(32)),
    "sigmoid router with a z-loss, ep2": (4, SIGMOID, DYNAMIC | per_rank(32) | EP2),
    "balanced by a bias": (4, BIASED, DYNAMIC | per_rank(32)),
    "balanced by a bias, tp2 sp": (4, BIASED, DYNAMIC | TP2 | SP | per_rank(64)),
    "balanced by a bias, ep2": (4, BIASED, DYNAMIC | per_rank(32) | EP2),
    "experts in the last layers, pp2": (4, MIXED_LAYERS, DYNAMIC | PP2 | per_rank(64)),
    "two tokens further, experts in the last layers, ep2": (4, MIXED_LAYERS | MTP, DYNAMIC | per_rank(32) | EP2),
    "experts, tp2 sp, decentralized": (
        2,
        MOE,
        BALANCED | TP2 | SP | DECENTRALIZED | per_rank(LONGEST) | {"model__context_parallel_size": 1},
    ),
    "two tokens further, experts, tp2 sp pp2, decentralized": (
        4,
        MOE | MTP,
        BALANCED | TP2 | SP | PP2 | DECENTRALIZED | per_rank(LONGEST) | {"model__context_parallel_size": 1},
    ),
    # Whole experts: over gloo the tokens of split ones cannot be gathered, of which each rank has another number.
    "experts, ep4 tp2 sp": (
        8,
        MOE,
        DYNAMIC
        | TP2
        | SP
        | per_rank(32)
        | {"model__expert_model_parallel_size": 4, "model__expert_tensor_parallel_size": 1},
    ),
    "sliding window": (4, {"model__window_size": [8, 0]}, DYNAMIC | per_rank(32)),
    "gemma 3": (4, GEMMA3, DYNAMIC | CP2 | per_rank(32)),
    "gemma 3, tp2 sp": (4, GEMMA3, DYNAMIC | TP2 | SP | per_rank(64)),
    "gemma 3, pp2 vpp2": (4, GEMMA3, DYNAMIC | PP2 | VPP2 | per_rank(64)),
    "gemma 3, full recomputation, dp_balanced cp2": (4, GEMMA3, BALANCED | CP2 | FULL),
    "overlapped reductions": (
        4,
        {},
        DYNAMIC
        | CP2
        | per_rank(32)
        | {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True, "ddp__bucket_size": 20000},
    ),
    "placed, 2 ranks": (2, {}, BALANCED | CP2 | PLACED),
    "placed, cp4, all_gather": (4, {}, BALANCED | CP4 | PLACED | transport("all_gather")),
    "placed, cp4, a2a": (4, {}, BALANCED | CP4 | PLACED | transport("a2a")),
    "placed, cp4, a2a 2 inside and p2p across": (
        4,
        {},
        BALANCED | CP4 | PLACED | transport("a2a+p2p") | {"model__hierarchical_context_parallel_sizes": [2, 2]},
    ),
    "placed, dynamic, 3 ranks, all_gather": (3, {}, DYNAMIC | per_rank(44) | PLACED | transport("all_gather")),
    "placed, dynamic, 6 ranks": (6, {}, DYNAMIC | per_rank(32) | PLACED),
    "placed, dynamic, a2a+p2p": (4, {}, DYNAMIC | per_rank(32) | PLACED | transport("a2a+p2p")),
    "placed, tp2 sp cp2": (4, {}, BALANCED | TP2 | SP | CP2 | PLACED),
    "placed, pp2 vpp2 cp2": (4, {}, BALANCED | PP2 | VPP2 | CP2 | PLACED),
    "placed, learned positions": (4, CLASSIC, DYNAMIC | per_rank(32) | PLACED),
    "placed, latent attention with yarn, full recomputation": (
        4,
        MLA | YARN | SHARPER,
        DYNAMIC | CP2 | FULL | per_rank(32) | PLACED,
    ),
    "placed, groups of heads, selective recomputation": (
        4,
        {},
        DYNAMIC | CP2 | per_rank(32) | HEAD_GROUPS | PLACED,
    ),
    "placed, two tokens further": (4, MTP, DYNAMIC | CP2 | per_rank(32) | PLACED),
    "placed, two tokens further, tp2 sp": (4, MTP, DYNAMIC | TP2 | SP | per_rank(64) | PLACED),
    "placed, two tokens further, experts, cp4": (4, MIXED_LAYERS | MTP, BALANCED | CP4 | PLACED),
    "placed, experts, ep2": (4, MOE, DYNAMIC | per_rank(32) | EP2 | PLACED),
    "placed, sigmoid router with a z-loss, ep2": (4, SIGMOID, DYNAMIC | per_rank(32) | EP2 | PLACED),
    "placed, sliding window": (4, {"model__window_size": [8, 0]}, DYNAMIC | per_rank(32) | PLACED),
    "placed, gemma 3, tp2 sp": (4, GEMMA3, DYNAMIC | TP2 | SP | per_rank(64) | PLACED),
    "buckets, 2 ranks": (2, {}, DYNAMIC | per_rank(64) | BUCKETS),
    "buckets, 4 ranks, cp2": (4, {}, DYNAMIC | CP2 | per_rank(32) | BUCKETS),
    "buckets, 4 ranks, dp_balanced cp2": (4, {}, BALANCED | CP2 | BUCKETS),
    "buckets, 4 ranks, all_gather": (4, {}, DYNAMIC | CP2 | per_rank(32) | transport("all_gather") | BUCKETS),
    "buckets, 8 ranks, a2a 2 inside and p2p across": (8, {}, DYNAMIC | CP2 | TWO_LEVELS | per_rank(16) | BUCKETS),
    "buckets, pp2 vpp2": (4, {}, DYNAMIC | PP2 | VPP2 | per_rank(64) | BUCKETS),
    "buckets, latent attention with yarn": (4, MLA | YARN | SHARPER, DYNAMIC | CP2 | per_rank(32) | BUCKETS),
    "buckets, gemma 3, tp2 sp": (4, GEMMA3, DYNAMIC | TP2 | SP | per_rank(64) | BUCKETS),
    "buckets, learned positions": (4, CLASSIC, DYNAMIC | per_rank(32) | BUCKETS),
    "buckets, two tokens further, cp2": (4, MTP, DYNAMIC | CP2 | per_rank(32) | BUCKETS),
    "buckets, hybrid, two tokens further, tp2 sp": (4, FURTHER, DYNAMIC | TP2 | SP | per_rank(64) | BUCKETS),
    "buckets, experts, ep2": (4, MOE, DYNAMIC | per_rank(32) | EP2 | BUCKETS),
    "buckets, balanced by a bias, ep2": (4, BIASED, DYNAMIC | per_rank(32) | EP2 | BUCKETS),
    "buckets, sigmoid router with a z-loss, ep2": (4, SIGMOID, DYNAMIC | per_rank(32) | EP2 | BUCKETS),
    "buckets, hybrid with experts, ep2, whole in tp2 sp": (
        4,
        HYBRID_EXPERTS,
        DYNAMIC | TP2 | SP | EP2 | ETP1 | per_rank(64) | BUCKETS,
    ),
    "buckets, placed, dynamic, 6 ranks": (6, {}, DYNAMIC | per_rank(32) | PLACED | BUCKETS),
    "buckets, placed, two tokens further, tp2 sp": (
        4,
        MTP,
        DYNAMIC | TP2 | SP | per_rank(64) | PLACED | BUCKETS,
    ),
    "plain optimizer": (4, {}, DYNAMIC | per_rank(32) | {"optimizer__use_distributed_optimizer": False}),
}
FAST = (
    "3 ranks",
    "4 ranks, cp2",
    "pp2 vpp2",
    "4 ranks, dp_balanced cp2",
    "gemma 3",
    "placed, 2 ranks",
    "placed, cp4, a2a 2 inside and p2p across",
    "placed, dynamic, 3 ranks, all_gather",
    "buckets, 4 ranks, cp2",
    "buckets, experts, ep2",
    "experts, tp2 sp, decentralized",
    "hybrid with experts, ep2, whole in tp2 sp",
)

STEPS = 3  # the first with other weights; ten in the slow part, which meets every kind of schedule

_reference: dict[str, Losses] = {}


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> str:
    return lengths_file(tmp_path_factory.mktemp("lengths"))


def reference(lengths: str, model: dict[str, Any], steps: int) -> Losses:
    key = repr((model, steps))
    if key not in _reference:
        _reference[key] = run_ranks(one_by_one, 1, lengths, model, None, steps)[0]
    return _reference[key]


@pytest.mark.parametrize(
    ("name", "steps"),
    [(name, STEPS) for name in FAST] + [pytest.param(name, packed_runs.STEPS, marks=slow) for name in CASES],
)
def test_packed_training_is_one_rank_one_by_one(name: str, steps: int, lengths: str) -> None:
    ranks, model, layout = CASES[name]
    results = run_ranks(packed_losses, ranks, lengths, model | layout, "cpu", steps)
    losses, sizes, _ = results[0]
    assert all(others == losses for others, _, _ in results), "ranks report different losses"
    worst = worst_difference(losses, reference(lengths, model, steps))
    assert max(worst) < TOLERANCE, worst
    used = {size for step in sizes for size in step}
    if layout.get("model__dynamic_context_parallel"):
        assert len(used) > 1 or "default limit" in name, "a schedule with one CP size only would prove little"
    else:
        assert used == {layout["model__context_parallel_size"]}


def test_the_default_limit_holds_one_longest_sample() -> None:
    for layout, expected in ((CP2, LONGEST // 2), (CP4, LONGEST // 4), (TP2 | SP | CP2, LONGEST // 2)):
        assert packed_config("", DYNAMIC | layout).model.max_seqlen_per_dp_cp_rank == expected
    odd = packed_config("", BALANCED | CP2 | {"dataset__seq_length": 129})
    assert odd.model.max_seqlen_per_dp_cp_rank == 66


AUX_LOSS = {"model__moe_router_load_balancing_type": "aux_loss", "model__moe_aux_loss_coeff": 0.1}


@pytest.fixture
def five_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train five steps.

    Rounding decides between two experts that a token likes equally: it does in the seventh step under one layout.
    """
    monkeypatch.setattr(packed_runs, "STEPS", 5)


@slow
@pytest.mark.usefixtures("five_steps")
@pytest.mark.parametrize("depths", [{}, MTP], ids=["", "two tokens further"])
@pytest.mark.parametrize(
    "layout",
    [CP2, TP2 | SP, TP2 | SP | CP2, PP2 | CP2, TP2 | SP | PP2],
    ids=["cp2", "tp2 sp", "tp2 sp cp2", "pp2", "tp2 sp pp2"],
)
def test_the_balance_of_experts_is_that_of_the_pack(
    layout: dict[str, Any], depths: dict[str, Any], lengths: str
) -> None:
    limit = per_rank(LONGEST // 2) if layout.get("model__context_parallel_size") else per_rank(LONGEST)
    ranks = 2 if layout is CP2 or layout == TP2 | SP else 4
    check_balance(ranks, MOE | depths | AUX_LOSS, BALANCED | layout | limit, lengths)


DYNAMIC_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "3 ranks": (3, per_rank(44)),
    "4 ranks": (4, per_rank(32)),
    "tp2 sp": (4, TP2 | SP | per_rank(64)),
    "pp2": (4, PP2 | per_rank(64)),
    "ep2": (4, per_rank(32) | {"model__expert_model_parallel_size": 2}),
    "ep4 cp2": (4, CP2 | per_rank(32) | {"model__expert_model_parallel_size": 4}),
    "full recomputation": (4, FULL | per_rank(32)),
    "buckets, ep2": (4, per_rank(32) | EP2 | BUCKETS),
}


@pytest.mark.usefixtures("five_steps")
@pytest.mark.parametrize("depths", [{}, pytest.param(MTP, marks=slow)], ids=["", "two tokens further"])
@pytest.mark.parametrize("name", [n if n == "3 ranks" else pytest.param(n, marks=slow) for n in DYNAMIC_EXPERTS])
def test_the_balance_of_experts_is_that_of_packs_of_many_sizes(
    name: str, depths: dict[str, Any], lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, layout = DYNAMIC_EXPERTS[name]
    if name == "3 ranks" and not depths:
        monkeypatch.setattr(packed_runs, "STEPS", STEPS)  # the fast one
    sizes = check_balance(ranks, MOE | depths | AUX_LOSS, DYNAMIC | layout, lengths)
    assert len(sizes) > 1, "a schedule with one CP size only would prove little"


@pytest.mark.usefixtures("five_steps")
@slow
@pytest.mark.parametrize("name", DYNAMIC_EXPERTS)
def test_the_balance_of_a_hybrids_experts_is_that_of_its_packs(name: str, lengths: str) -> None:
    """Our code slices the padding of the experts' input.

    upstream's hybrid model gives every tensor-parallel rank the whole mask.
    """
    ranks, layout = DYNAMIC_EXPERTS[name]
    model = HYBRID | MOE | {"model__hybrid_layer_pattern": "ME*E"} | AUX_LOSS
    sizes = check_balance(ranks, model, DYNAMIC | layout, lengths)
    assert len(sizes) > 1, "a schedule with one CP size only would prove little"


def check_balance(ranks: int, model: dict[str, Any], layout: dict[str, Any], lengths: str) -> set[int]:
    """Check losses against one rank that trains on the same packs.

    The auxiliary loss depends on the pack. Returns the groups' sizes.
    """
    overrides = model | layout | {"model__dynamic_context_parallel_calibration_iters": 0}
    losses, sizes, _ = run_ranks(packed_losses, ranks, lengths, overrides)[0]
    packs = run_ranks(packs_of, ranks, lengths, overrides)[0]
    assert any(len(ids) > 1 for step in packs for ids in step)
    alone = run_ranks(one_by_one, 1, lengths, model, packs)[0]
    worst = worst_difference(losses, alone)
    assert max(worst) < TOLERANCE, worst
    unbalanced = run_ranks(one_by_one, 1, lengths, model | {"model__moe_aux_loss_coeff": 0.0}, packs)[0]
    assert max(worst_difference(unbalanced, [step[:2] for step in alone])) > 1e-3, (
        "the auxiliary loss does nothing here"
    )
    return {size for step in sizes for size in step}
