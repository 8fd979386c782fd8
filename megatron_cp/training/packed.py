"""Steps of packed microbatches: the scheduler, the process groups and the checks of a run put together."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.iterator import DynamicBatches, SampleSource, StepPlan
from megatron_cp.errors import DataError
from megatron_cp.parallel.layout import layout_of
from megatron_cp.training.batch_checks import PackChecks
from megatron_cp.training.batches import Step
from megatron_cp.training.calibrate import CostTracker
from megatron_cp.training.scheduling import keeps_step, make_schedule, model_cost
from megatron_cp.training.setup import Run


class PackedSteps:
    """Steps of packed microbatches; the next one is scheduled and read while the current one runs.

    Raises:
        RuntimeFault: on every rank, where the samples or the schedule of any rank cannot be used.
    """

    def __init__(self, run: Run, source: SampleSource, consumed_samples: int, training: bool) -> None:
        config, model = run.config, run.config.model
        assert run.dynamic_groups is not None
        size = config.train.global_batch_size
        if not training:
            size = config.validation.eval_global_batch_size or size
        self._run = run
        self._costs = CostTracker(run, model_cost(config), active=training)
        self._checks = PackChecks(run, size)
        self._plan: StepPlan | None = None
        self._batches = DynamicBatches(
            source,
            size,
            partial(make_schedule, config, layout_of(config, run.all_ranks.size())),
            run.dynamic_groups,
            keep_step=keeps_step(model),
            device=run.device,
            consumed_samples=consumed_samples,
            cost=self._costs.cost,
            longest=model.seq_length,
        )

    def __next__(self) -> Step:
        problems: list[str] = []
        plan = None
        with self._run.phases("schedule"):
            try:
                plan = next(self._batches)
            except (DataError, ValueError, IndexError, OSError) as error:
                problems.append(str(error))
        with self._run.phases("data"):
            self._checks.agree(plan, problems)
            assert plan is not None
            microbatches = self._batches.microbatches(plan)
        self._plan = plan
        return Step(microbatches, plan.schedule.num_microbatches, plan.lengths, plan)

    def observe(self) -> None:
        if self._plan is not None and self._costs.observe(self._plan):
            self._batches.use_cost(self._costs.cost)

    @property
    def cost(self) -> CostModel:
        """The cost model in use: calibrated once enough steps were measured."""
        return self._costs.cost

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict() | {"calibration": self._costs.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the saved ones stopped; in another layout with a cost model of its own."""
        if self._costs.load_state_dict(state.get("calibration")):
            self._batches.load_state_dict(state)
        else:
            self._batches.load_state_dict({"consumed_samples": state["consumed_samples"]})

    def close(self) -> None:
        self._batches.close()
