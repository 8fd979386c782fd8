"""Prefetched steps: their number, and their metrics."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron_cp.data.samples.varlen import MockVarlenDataset
from megatron_cp.dynamic_cp import Group, Schedule, padded_length, schedule
from megatron_cp.dynamic_cp.analysis.report import cp_sizes, imbalance_of_work, padding_fraction
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.dynamic_cp.runtime.iterator import DynamicBatches, _checksum_of_plan
from megatron_cp.estimate.cost_presets import cost_preset
from megatron_cp.training.packed import steps as packed
from tests.training_runs import tiny_config

LENGTHS = [5, 17, 40, 9, 3, 64, 100, 23, 1, 12] * 4


class Counting(MockVarlenDataset):
    """Notes which samples are scheduled."""

    def __init__(self) -> None:
        super().__init__(LENGTHS, 100, seed=1)
        self.asked: set[int] = set()

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        self.asked |= set(indices.tolist())
        return super().lengths(indices)


def batches(source: MockVarlenDataset, num_steps: int | None) -> DynamicBatches:
    groups = SimpleNamespace(position=0)
    scheduler = lambda lengths, cost: schedule(lengths, 2, 64, cost=cost)  # noqa: E731
    return DynamicBatches(source, 10, scheduler, groups, lockstep=False, num_steps=num_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_steps", "asked"), [(None, 30), (3, 30), (2, 20), (0, 20)])
def test_the_last_step_makes_none_ahead(num_steps: int | None, asked: int) -> None:
    source = Counting()
    steps = batches(source, num_steps)
    plans = [next(steps), next(steps)]
    steps.state_dict()  # comes when nothing is being made
    steps.close()
    assert source.asked == set(range(asked))
    assert [plan.samples for plan in plans] == [tuple(range(10)), tuple(range(10, 20))]


@pytest.mark.parametrize(("training", "num_steps"), [(True, 7), (False, 2)])
def test_the_number_of_steps_is_passed_on(monkeypatch: pytest.MonkeyPatch, training: bool, num_steps: int) -> None:
    for name in ("CostTracker", "layout_of", "model_cost"):
        monkeypatch.setattr(packed, name, MagicMock())
    opened = MagicMock()
    monkeypatch.setattr(packed, "DynamicBatches", opened)
    config = tiny_config(
        model__sequence_packing_scheduler="dp_balanced", train__train_iters=10, validation__eval_iters=2
    )
    packed.PackedSteps(MagicMock(config=config, progress=MagicMock(iteration=3)), Counting(), 30, training)
    assert opened.call_args.kwargs["num_steps"] == num_steps


@pytest.mark.parametrize("ranks", [6, 64])
@pytest.mark.parametrize("preset", ["h100_8b", "a100_mha_slownet", "h100_8b_a2a"])
def test_step_metrics_equal_sums_over_groups(ranks: int, preset: str) -> None:
    lengths, cost = sample_lengths("documents", 300, 30_000, 2), cost_preset(preset)
    plan = schedule(lengths, ranks, 8192, cost=cost, sequence_parallel_size=2)
    groups = [group for row in plan.microbatches for group in row]
    work = np.zeros(ranks)
    for group in groups:
        work[list(group.ranks)] += cost.seconds(lengths[list(group.sample_ids)], group.cp_size)
    assert imbalance_of_work(plan, lengths, cost) == pytest.approx(work.max() / work.mean(), rel=1e-12)
    padded = sum(padded_length(int(lengths[x]), group.cp_size, 2) for group in groups for x in group.sample_ids)
    assert padding_fraction(plan, lengths.tolist()) == pytest.approx(padded / lengths.sum() - 1, rel=1e-12)
    assert cp_sizes(plan) == Counter(group.cp_size for group in groups)


def test_a_plan_includes_its_metrics() -> None:
    steps = batches(Counting(), num_steps=1)
    plan = next(steps)
    steps.close()
    metrics = {name: vars(plan)[name] for name in ("checksum", "imbalance", "padding_fraction", "cp_sizes")}
    assert metrics == {
        "checksum": _checksum_of_plan(plan.samples, plan.lengths, plan.schedule),
        "imbalance": imbalance_of_work(plan.schedule, plan.lengths, plan.cost),
        "padding_fraction": padding_fraction(plan.schedule, plan.lengths),
        "cp_sizes": cp_sizes(plan.schedule),
    }


def test_the_checksum_of_a_plan_sees_every_difference() -> None:
    def checksum(
        *microbatches: list[Group], samples: tuple[int, ...] = (7, 8, 9), lengths: tuple[int, ...] = (5, 6, 4)
    ) -> int:
        return _checksum_of_plan(samples, lengths, Schedule(2, 64, list(microbatches)))

    one, two, both = (0,), (1,), (0, 1)
    different = [
        checksum([Group(one, (0, 1)), Group(two, (2,))]),
        checksum([Group(one, (0, 1)), Group(two, (2,))], samples=(7, 8, 10)),
        checksum([Group(one, (0, 1)), Group(two, (2,))], lengths=(5, 6, 3)),
        checksum([Group(one, (0,)), Group(two, (1, 2))]),
        checksum([Group(one, (1, 0)), Group(two, (2,))]),
        checksum([Group(one, (0, 1))], [Group(two, (2,))]),
        checksum([Group(one, (0, 1))], [Group(one, (2,))]),
        checksum([Group(one, (0, 1))], [Group(both, (2,))]),
        checksum([Group(one, (0, 1)), Group(two, (2,))], []),
    ]
    assert len(set(different)) == len(different)
    assert different[0] == checksum([Group(one, (0, 1)), Group(two, (2,))])
