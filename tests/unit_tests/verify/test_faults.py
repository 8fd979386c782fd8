"""Faults planted one by one: each is caught, with a verdict that says where to look."""

import functools
import re
from typing import Any, NamedTuple

import pytest

from megatron_cp.one_rank import on_one_rank
from megatron_cp.verify.compare import compare_with_one_rank
from megatron_cp.verify.reduce import comparable
from megatron_cp.verify.report import diagnose
from tests.ranks import run_ranks
from tests.training_runs import tiny_config
from tests.unit_tests.training.layouts import CP2, CP4, HCP, TP2, over
from tests.unit_tests.verify import faults

Overrides = dict[str, Any]
PLAIN = {"optimizer__use_distributed_optimizer": False}


class Seen(NamedTuple):
    equal: bool
    probe: str | None
    said: str


class Case(NamedTuple):
    layout: Overrides
    said: str  # what the verdict must say
    probed: bool  # whether the attention probe sees it too


FORWARD = "the first loss differs already"
COMMUNICATE = "the groups do not communicate as they should"
REDUCED = "they are not reduced over all data- and context-parallel ranks"
CASES: dict[str, list[Case]] = {
    "nothing": [Case(CP4 | HCP, "", False), Case(TP2 | CP2, "", False)],
    "skipped_hop": [Case(CP4, COMMUNICATE, True), Case(CP4 | HCP, COMMUNICATE, True)],
    "skipped_gradient_hop": [Case(CP4, "the key gradient of a sequence sharded over 4 ranks differs", True)],
    "skipped_exchange": [Case(CP4 | over("a2a"), COMMUNICATE, True), Case(CP4 | HCP, COMMUNICATE, True)],
    "skipped_all_gather": [Case(CP4 | over("all_gather"), COMMUNICATE, True)],
    "batch_sliced_twice": [Case(CP4, "holds 2 tokens, not 32 / cp 4 = 8: already sliced?", False)],
    "batch_sliced_again_in_the_step": [Case(CP2, "look at how batches are dealt to ranks and sliced", False)],
    "rope_of_another_group": [Case(TP2 | CP2, f"{FORWARD}.*the probe found nothing wrong.*RoPE", False)],
    "loss_averaged_per_rank": [Case(CP4 | HCP, "look at how batches .* the reduction of the loss", False)],
    "gradients_not_reduced_over_cp": [Case(CP4 | HCP, REDUCED, False), Case(CP4 | PLAIN, REDUCED, False)],
    "gradients_scaled": [Case(CP4, "all gradients are 4 times the reference's", False)],
}
PARAMETERS = [(name, index) for name, cases in CASES.items() for index in range(len(cases))]


def observe() -> list[Seen]:
    """All cases, one after the other, on one set of ranks."""
    seen = []
    for name, index in PARAMETERS:
        (layout,) = comparable([tiny_config(**CASES[name][index].layout)], 4, 2)
        with getattr(faults, name)():
            result = compare_with_one_rank(layout, on_one_rank(layout))
        seen.append(Seen(result.equal, result.probe, " ".join(diagnose(result))))
    return seen


@functools.cache
def observed() -> list[list[Seen]]:
    return run_ranks(observe, 4, timeout=280)  # all cases: a minute, several on a busy machine


@pytest.mark.parametrize(("name", "index"), PARAMETERS)
def test_a_planted_fault_is_caught(name: str, index: int) -> None:
    case = CASES[name][index]
    for seen in (theirs[PARAMETERS.index((name, index))] for theirs in observed()):
        assert seen.equal == (name == "nothing")
        assert (seen.probe is not None) == case.probed, seen
        assert re.search(case.said, seen.said), seen.said
