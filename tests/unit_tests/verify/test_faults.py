"""Faults planted one by one, in the layout alone, are detected.

The verdict names the place of each.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.verify import compare
from megatron_cp.verify.measure import Measurement
from megatron_cp.verify.reduce import comparable
from megatron_cp.verify.report import diagnose
from tests.ranks import run_ranks
from tests.training_runs import tiny_config
from tests.unit_tests.verify.faults import FAULTS, table
from tests.unit_tests.verify.faults.registry import BACKWARD, Overrides

DOCUMENTATION = Path(__file__).parents[3] / "docs/explanation/verify.md"
# One for each part of the verdict; all others are slow together.
QUICK = (
    "skipped_hop",
    "late_positions",
    "loss_without_mask",
    "last_microbatch_dropped",
    "not_reduced_over_cp",
    "gradient_of_the_last_piece",
    "norm_of_the_rank",
    "clipped_by_own_norm",
    "same_dropout_on_all_ranks",
)
# By how much a fault exceeds the tolerance, at least, and how much of it a right layout takes, at most.
FAR, NEAR = 10.0, 0.3


class Seen(NamedTuple):
    equal: bool
    reported: str
    excess: float  # the largest difference, by its tolerance; infinite where there is none
    right: float  # the same of the same layout without the fault


def excess_of(result: compare.Comparison) -> float:
    return max((row.difference / (row.tolerance or 1e-9) for row in result.rows()), default=float("inf"))


@contextmanager
def planted_in_the_layout(name: str | None, references: dict[str, Measurement]) -> Iterator[None]:
    """Plant a fault while the layout is measured, and measure each reference once."""

    def change(measure: Callable) -> Callable:
        def measured(config: Any, groups: Any = None, **given: Any) -> Measurement:
            if groups is None:
                with FAULTS[name].plant() if name else mock.MagicMock():
                    return measure(config, groups, **given)
            if repr(config) not in references:
                references[repr(config)] = measure(config, groups, **given)
            return replace(references[repr(config)])

        return measured

    with mock.patch.object(compare, "measure", change(compare.measure)):
        yield


def observe(names: tuple[str, ...], larger: Overrides | None = None) -> dict[str, Seen]:
    """Observe these faults one after the other, on one set of ranks.

    The ``larger`` model is compared in full size.
    """
    seen, rights = {}, {}
    references_of: dict[str, dict[str, Measurement]] = {}
    for name in names:
        config = tiny_config(**FAULTS[name].layout | (larger or {}))
        (layout,) = comparable([config], 4, 2, full=larger is not None)
        reference = on_single_rank(layout)
        # A reference has the packs of its layout.
        packs = repr(layout) if layout.model.sequence_packing_scheduler else ""
        references = references_of.setdefault(packs, {})
        if repr(layout) not in rights:
            with planted_in_the_layout(None, references):
                right = compare.compare_with_single_rank(layout, reference)
            assert right.equal, (name, diagnose(right))
            rights[repr(layout)] = excess_of(right)
        with planted_in_the_layout(name, references):
            result = compare.compare_with_single_rank(layout, reference)
        seen[name] = Seen(result.equal, " ".join(diagnose(result)), excess_of(result), rights[repr(layout)])
    return seen


def group_of(name: str) -> str:
    """Return the faults that share their ranks."""
    return "quick" if name in QUICK else FAULTS[name].plant.__module__


@functools.cache
def observed(group: str) -> list[dict[str, Seen]]:
    return run_ranks(observe, 4, tuple(name for name in FAULTS if group_of(name) == group), timeout=900)


def check(name: str, found: list[dict[str, Seen]]) -> None:
    says = FAULTS[name].says
    for seen in (theirs[name] for theirs in found):
        assert seen.right < NEAR
        assert seen.equal == (not says), seen
        assert re.search(says or "^$", seen.reported), seen
        assert says == BACKWARD or not re.search(BACKWARD, seen.reported), "the forward pass is to blame"
        assert not says or seen.excess > FAR, seen


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_a_planted_fault_is_caught(name: str) -> None:
    check(name, observed(group_of(name)))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", ["half_precision", "gradients_in_half_precision", "decay_of_norms"])
def test_a_larger_model_hides_no_fault(name: str) -> None:
    """The same tolerances must find the faintest faults in a larger model.

    It has 8 layers, is 256 wide, and has sequences of 256 tokens.
    """
    larger = {
        "model__num_layers": 8,
        "model__hidden_size": 256,
        "model__ffn_hidden_size": 512,
        "model__init_method_std": 0.05,
    }
    larger |= {"dataset__seq_length": 256, "model__seq_length": 256}
    check(name, run_ranks(observe, 4, (name,), larger, timeout=900))


def test_many_faults_are_planted_and_documented() -> None:
    """The page must have the table that this module prints."""
    assert sum(bool(each.says) for each in FAULTS.values()) >= 30
    assert table() in DOCUMENTATION.read_text()
    assert set(QUICK) <= FAULTS.keys()


if __name__ == "__main__":
    print(table())
