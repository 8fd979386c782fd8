"""A transport is one object with all that the package needs.

A fifth transport therefore changes no other file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_cp.attention.modules.probe import ProbeError
from megatron_cp.attention.transports.registry import HIERARCHICAL, RING, TRANSPORTS, cost_transport
from megatron_cp.attention.transports.select import possible_transports
from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.dynamic_cp.calibration import Calibrator
from megatron_cp.planner.scheduling import model_cost
from megatron_cp.rules import Environment, check
from megatron_cp.rules.remedies import Case
from megatron_cp.training.setup import setup
from megatron_cp.verify.compare import compare_with_single_rank
from megatron_cp.verify.reduce import comparable
from megatron_cp.verify.report import diagnose
from tests.doubles import keys_only
from tests.doubles.keys_only import KEYS_ONLY
from tests.ranks import run_ranks
from tests.training_runs import VOCAB, Losses, tiny_config, train_losses, worst_difference
from tests.unit_tests.training.layouts.cases import CP2, over

FIFTH = CP2 | over(KEYS_ONLY.name)
LISTED = CP2 | {"model__cp_comm_type": [KEYS_ONLY.name, RING.name, KEYS_ONLY.name, RING.name]}
DYNAMIC = {
    "model__cp_comm_type": KEYS_ONLY.name,
    "model__dynamic_context_parallel": True,
    "model__sequence_packing_scheduler": "default_dynamic_cp",
    "model__max_seqlen_per_dp_cp_rank": 16,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, KEYS_ONLY.name, KEYS_ONLY)


def test_a_name_is_unknown_until_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[tuple[str, str]]:
        violations = check(tiny_config(**FIFTH), 2, environment=Environment.of("cpu"))
        return [(each.rule, each.severity) for each in violations if each.severity == "error"]

    assert found() == []
    monkeypatch.delitem(TRANSPORTS, KEYS_ONLY.name)
    assert found() == [("C1", "error")]


def test_rules_read_it() -> None:
    (misnamed,) = check(tiny_config(**CP2 | over("kv")), 2, environment=Environment.of("cpu"))
    assert f"did you mean '{KEYS_ONLY.name}'" in misnamed.message
    (without_te,) = (
        each for each in check(tiny_config(**FIFTH), 2, environment=Environment.of("gpu")) if each.rule == "C16"
    )
    assert f"no context parallelism with model.cp_comm_type={KEYS_ONLY.name} in any version" in without_te.message
    assert without_te.severity == "warning"  # our own attention is used instead


@pytest.mark.parametrize("auto", [None, 0])
def test_auto_considers_transports_that_opt_in(auto: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, KEYS_ONLY.name, dataclasses.replace(KEYS_ONLY, auto=auto))
    found, _ = possible_transports(heads=7, kv_heads=7, tp=1, cp=4)
    assert found[0] == (RING.name if auto is None else KEYS_ONLY.name, None)


def test_the_cost_model_counts_its_messages() -> None:
    """The transport has one exposed exchange, no hops, and no share of the heads."""
    config = tiny_config(**DYNAMIC)
    cost = model_cost(Case(config, 4, None, Environment()))
    assert cost.transport == KEYS_ONLY.name == cost_transport([KEYS_ONLY.name] * 4)
    bare = dataclasses.replace(cost, kv_intra=0.0, ring_step=0.0)
    moved = cost.kv_intra * 1000 * 3 / 4
    assert cost.seconds([1000], 4) == pytest.approx(bare.seconds([1000], 4) + moved + cost.ring_step)
    assert cost_transport([KEYS_ONLY.name, RING.name]) == RING.name
    assert cost_transport([HIERARCHICAL.name]) == RING.name  # by its terms
    rng = np.random.default_rng(0)
    calibrator = Calibrator(cost)
    for size in (1, 2, 4) * 40:
        lengths = rng.integers(10, 3000, 4)
        calibrator.observe([(lengths, size)], 3 * cost.seconds(lengths, size))
    assert calibrator.fit().cost.seconds([2000], 4) == pytest.approx(3 * cost.seconds([2000], 4), rel=1e-6)


def _train(runs: list[dict[str, Any]]) -> list[Losses]:
    return [train_losses(overrides, 1) for overrides in runs]


def test_a_training_step_gives_the_numbers_of_one_rank() -> None:
    """The numbers must be one rank's in every use of the transport.

    Static, mixed with another transport, packed, and in groups that change with the microbatch.
    """
    alone = {"model__context_parallel_size": 1, "model__dynamic_context_parallel": False}
    documents = {"dataset__kind": "mock_documents"}
    packed = documents | {"model__sequence_packing_scheduler": "dp_balanced"}
    plain, packs = run_ranks(_train, 1, [alone, alone | packed])[0]
    static, listed, in_packs, dynamic = run_ranks(_train, 2, [FIFTH, LISTED, FIFTH | packed, DYNAMIC | documents])[0]
    for found, expected in ((static, plain), (listed, plain), (in_packs, packs), (dynamic, packs)):
        assert max(worst_difference(found, expected)) < 1e-5


def _verify() -> tuple[bool, list[str]]:
    (layout,) = comparable([tiny_config(**FIFTH)], 2, 1)
    result = compare_with_single_rank(layout, on_single_rank(layout))
    return result.equal, diagnose(result)


def _probe() -> str:
    try:
        setup(tiny_config(**FIFTH), VOCAB).close()
    except ProbeError as error:
        return str(error)
    return ""


def test_probe_and_verification_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(_verify, 2) == [(True, [])] * 2
    allowed = keys_only._allowed
    monkeypatch.setattr(keys_only, "_allowed", lambda call, peers: allowed(call, peers).flip(0))
    for reported in run_ranks(_probe, 2):
        assert f"layers 1, 2, 3, 4, {KEYS_ONLY.name} over ranks [0, 1]: the output" in reported
