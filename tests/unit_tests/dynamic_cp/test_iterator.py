"""Steps made ahead: how many of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_cp.data.varlen import MockVarlenDataset
from megatron_cp.dynamic_cp import schedule
from megatron_cp.dynamic_cp.iterator import DynamicBatches

LENGTHS = [5, 17, 40, 9, 3, 64, 100, 23, 1, 12] * 4


class Counting(MockVarlenDataset):
    """Notes which samples are scheduled."""

    def __init__(self) -> None:
        super().__init__(LENGTHS, 100, seed=1)
        self.asked: set[int] = set()

    def length(self, index: int) -> int:
        self.asked.add(index)
        return super().length(index)


def batches(source: MockVarlenDataset, num_steps: int | None) -> DynamicBatches:
    groups = SimpleNamespace(position=0)
    scheduler = lambda lengths, cost: schedule(lengths, 2, 64, cost=cost)  # noqa: E731
    return DynamicBatches(source, 10, scheduler, groups, keep_step=False, num_steps=num_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_steps", "asked"), [(None, 30), (3, 30), (2, 20), (0, 20)])
def test_the_last_step_makes_none_ahead(num_steps: int | None, asked: int) -> None:
    source = Counting()
    steps = batches(source, num_steps)
    plans = [next(steps), next(steps)]
    if steps._ahead is not None:
        steps._ahead.result()
    steps.close()
    assert source.asked == set(range(asked))
    assert [plan.samples for plan in plans] == [tuple(range(10)), tuple(range(10, 20))]
