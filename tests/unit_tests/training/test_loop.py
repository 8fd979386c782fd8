"""Decisions of the training loop."""

import pytest

from megatron_cp.training import loop


@pytest.mark.parametrize(("interval", "due"), [(None, []), (0, []), (1, [1, 2, 3, 4]), (2, [2, 4]), (5, [])])
def test_actions_at_intervals(interval: int | None, due: list[int]) -> None:
    """Saving, evaluation, the end and garbage collection have intervals; 0 is never."""
    assert [iteration for iteration in range(1, 5) if loop._due(iteration, interval)] == due
