"""When the cost model of a run is measured, and which saved one it goes on with."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.types import Group, Schedule
from megatron_cp.training.packed.calibration import CostTracker
from megatron_cp.training.setup import TrainProgress
from tests.ranks import run_ranks

PRIOR = CostModel(per_microbatch=0.1, quadratic=1e-6, linear=1e-4)
ITERATIONS = 6
MEASURED = [3, 4, 5, 6]  # of a new run
PLAN: Any = SimpleNamespace(lengths=[50, 7], schedule=Schedule(1, 64, [[Group((0,), (0, 1))]]))


def tracker(iteration: int, prior: CostModel = PRIOR, **model: Any) -> tuple[CostTracker, Any]:
    """Return the tracker of a run of one rank that begins after ``iteration``."""
    settings = ModelConfig(dynamic_context_parallel_calibration_iters=ITERATIONS, **model)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(model=settings),
        all_ranks=dist.group.WORLD,
        progress=TrainProgress(iteration),
        dynamic_groups=SimpleNamespace(position=0),
        device=torch.device("cpu"),
        work_clock=None,
    )
    return CostTracker(run, prior, active=True), run


def train(costs: CostTracker, run: Any, last: int) -> tuple[list[int], list[int]]:
    """Return measured iterations, and those after which the cost model changed."""
    measured, changed = [], []
    for iteration in range(run.progress.iteration + 1, last + 1):
        before = costs._measured
        if run.work_clock is not None:
            run.work_clock.seconds = 0.3
        run.progress.iteration = iteration
        if costs.observe(PLAN):
            changed.append(iteration)
        measured += [iteration] * (costs._measured - before)
    return measured, changed


def resumed(stop: int, prior: CostModel = PRIOR, **model: Any) -> tuple[bool, CostModel, CostModel, Any]:
    first, run = tracker(0)
    train(first, run, stop)
    second, run = tracker(stop, prior, **model)
    taken = second.load_state_dict(first.state_dict())
    cost = second.cost
    return taken, first.cost, cost, train(second, run, 30)


def whole() -> Any:
    costs, run = tracker(0)
    return train(costs, run, 30)


def test_a_new_run_is_measured_after_its_warm_up() -> None:
    assert run_ranks(whole, 1)[0] == (MEASURED, [ITERATIONS])


@pytest.mark.parametrize(
    ("prior", "model"),
    [
        (PRIOR, {"tensor_model_parallel_size": 2}),
        (PRIOR, {"cp_comm_type": "all_gather"}),
        (CostModel(0.1, 1e-6, 1e-4, transport="a2a"), {"cp_comm_type": "a2a"}),
        (CostModel(0.1, 1e-6, 1e-4, ranks_per_node=4), {}),
        (CostModel(0.1, 1e-6, 1e-4, placement="balanced"), {}),
    ],
    ids=["layout", "transport", "formula", "nodes", "placement"],
)
def test_another_layout_is_measured_anew(prior: CostModel, model: dict[str, Any]) -> None:
    taken, fitted, cost, measured = run_ranks(partial(resumed, 12, prior, **model), 1)[0]
    assert not taken and fitted != PRIOR and cost == prior
    assert measured == ([15, 16, 17, 18], [18])


def test_the_same_layout_keeps_its_cost_model() -> None:
    taken, fitted, cost, measured = run_ranks(resumed, 1, 12)[0]
    assert taken and fitted != PRIOR and cost == fitted and measured == ([], [])


def older_state() -> tuple[list[bool], CostModel]:
    """Return the state of a version that saved its prior.

    That version derived another prior from the same settings.
    """
    state = tracker(0)[0].state_dict()
    for name in ("transport", "ranks_per_node", "device", "placement"):
        del state["of"][name]
    del state["cost"]["placement"]
    state["of"]["prior"] = asdict(CostModel(0.3, 1e-6, 1e-4))
    state["cost"] |= {"per_microbatch": 0.2}
    same, other = tracker(12)[0], tracker(12, tensor_model_parallel_size=2)[0]
    in_pieces = tracker(12, replace(PRIOR, placement="balanced"))[0]
    taken = [each.load_state_dict(state) for each in (same, other, in_pieces)]
    return taken, same.cost


def test_a_run_of_an_older_version_keeps_its_cost_model() -> None:
    assert run_ranks(older_state, 1)[0] == ([True, False, False], CostModel(0.2, 1e-6, 1e-4))


def cost_of_rank() -> CostModel:
    return tracker(0, replace(PRIOR, linear=1e-4 * (1 + 1e-15 * dist.get_rank())))[0].cost


def test_every_rank_has_the_first_ranks_bits() -> None:
    assert run_ranks(cost_of_rank, 2) == [PRIOR, PRIOR]


def test_a_resumed_run_is_measured_after_a_warm_up_of_its_own() -> None:
    """Two iterations had been measured before it was stopped."""
    assert run_ranks(resumed, 1, 4)[0][3] == ([7, 8], [8])


@pytest.mark.parametrize("shared", ["pipeline_model_parallel_size", "expert_tensor_parallel_size"])
def test_ranks_that_wait_for_each_other_are_not_measured(shared: str) -> None:
    def work_clock() -> Any:
        return tracker(0, num_moe_experts=4, **{shared: 2})[1].work_clock

    assert run_ranks(work_clock, 1)[0] is None
