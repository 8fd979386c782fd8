"""Steps of packed microbatches: the scheduler, the process groups and the checks of a run put together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.config.run_config import RunConfig
from megatron_cp.dynamic_cp.runtime.iterator import DynamicBatches, SampleSource, Scheduler, StepPlan
from megatron_cp.dynamic_cp.runtime.packing import Sample
from megatron_cp.parallel.layout import layout_of
from megatron_cp.training.batch_checks import PackChecks, Problem
from megatron_cp.training.batches import Step, steps_to_come
from megatron_cp.training.packed.calibration import CostTracker
from megatron_cp.training.packed.scheduling import keeps_step, make_schedule, model_cost
from megatron_cp.training.setup import Run


class OneLength:
    """A data set of samples of one length as a source of samples to pack."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of samples."""
        return np.full(len(indices), self._length)

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[index]


def of_evaluation(config: RunConfig) -> RunConfig:
    """The configuration that evaluation is scheduled by: training's, but for a context parallel size of its own."""
    size, training = config.dist.eval_context_parallel_size, config.model
    if size is None:
        return config
    model = replace(
        training,
        context_parallel_size=size,
        hierarchical_context_parallel_sizes=None,
        dynamic_context_parallel=False,
        sequence_packing_scheduler="dp_balanced",
        max_seqlen_per_dp_cp_rank=None,
    )
    found = replace(config, model=model).finalize()
    assert model.max_seqlen_per_dp_cp_rank is not None
    _, samples = config.evaluation_batch
    least = training.max_seqlen_per_dp_cp_rank or samples * model.max_seqlen_per_dp_cp_rank
    model.max_seqlen_per_dp_cp_rank = max(least, model.max_seqlen_per_dp_cp_rank)
    return found


class PackedSteps:
    """Steps of packed microbatches; the next one is scheduled and read while the current one runs.

    Raises:
        RuntimeFault: on every rank, where the samples or the schedule of any rank cannot be used.
    """

    def __init__(
        self,
        run: Run,
        source: SampleSource,
        consumed_samples: int,
        training: bool,
        scheduler: Scheduler | None = None,
    ) -> None:
        """``scheduler``: makes the schedules; as configured by default."""
        config, model = run.config if training else of_evaluation(run.config), run.config.model
        assert run.dynamic_groups is not None
        size = config.train.global_batch_size if training else config.evaluation_batch[0]
        self._run = run
        self._costs = CostTracker(run, model_cost(config), active=training)
        self._checks = PackChecks(run, size)
        self._plan: StepPlan | None = None
        self._batches = DynamicBatches(
            source,
            size,
            scheduler or partial(make_schedule, config, layout_of(config, run.all_ranks.size())),
            run.dynamic_groups,
            keep_step=keeps_step(model),
            device=run.device,
            consumed_samples=consumed_samples,
            cost=self._costs.cost,
            longest=model.seq_length,
            num_steps=steps_to_come(run, training),
        )

    def __next__(self) -> Step:
        problems: list[Problem] = []
        plan = None
        with self._run.phases("schedule"):
            try:
                plan = next(self._batches)
            except DataError as error:
                problems.append(error)
            except (ValueError, IndexError, OSError) as error:
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

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict() | {"calibration": self._costs.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the saved ones stopped; in another layout or transport with a cost model of its own."""
        if self._costs.load_state_dict(state.get("calibration")):
            self._batches.load_state_dict(state)
        else:
            self._batches.load_state_dict({"consumed_samples": state["consumed_samples"]})

    def close(self) -> None:
        self._batches.close()
