"""Faults planted one by one, in the layout alone: each is caught, with a verdict that says where to look."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from megatron_cp.one_rank import on_one_rank
from megatron_cp.verify import compare
from megatron_cp.verify.measure import Measurement
from megatron_cp.verify.reduce import comparable
from megatron_cp.verify.report import diagnose
from tests.ranks import run_ranks
from tests.training_runs import tiny_config
from tests.unit_tests.verify.faults import FAULTS, table

DOCUMENTATION = Path(__file__).parents[3] / "docs/verify.md"
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
    said: str
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


def observe(names: tuple[str, ...]) -> dict[str, Seen]:
    """All these faults, one after the other, on one set of ranks."""
    seen, references, rights = {}, {}, {}
    for name in names:
        (layout,) = comparable([tiny_config(**FAULTS[name].layout)], 4, 2)
        reference = on_one_rank(layout)
        if repr(layout) not in rights:
            with planted_in_the_layout(None, references):
                right = compare.compare_with_one_rank(layout, reference)
            assert right.equal, (name, diagnose(right))
            rights[repr(layout)] = excess_of(right)
        with planted_in_the_layout(name, references):
            result = compare.compare_with_one_rank(layout, reference)
        seen[name] = Seen(result.equal, " ".join(diagnose(result)), excess_of(result), rights[repr(layout)])
    return seen


@functools.cache
def observed(quick: bool) -> list[dict[str, Seen]]:
    names = tuple(name for name in FAULTS if (name in QUICK) == quick)
    return run_ranks(observe, 4, names, timeout=900)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_a_planted_fault_is_caught(name: str) -> None:
    says = FAULTS[name].says
    for seen in (theirs[name] for theirs in observed(name in QUICK)):
        assert seen.right < NEAR
        assert seen.equal == (not says), seen
        assert re.search(says or "^$", seen.said), seen
        assert not says or seen.excess > FAR, seen


def test_many_faults_are_planted_and_documented() -> None:
    """The documentation's table is the one that ``python -m tests.unit_tests.verify.test_faults`` prints."""
    assert sum(bool(each.says) for each in FAULTS.values()) >= 30
    assert table() in DOCUMENTATION.read_text()
    assert set(QUICK) <= FAULTS.keys()


if __name__ == "__main__":
    print(table())
