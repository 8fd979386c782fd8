"""Steps of packed microbatches: scheduler, process groups and checks combined."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.runtime.iterator import DynamicBatches, SampleSource, Scheduler, StepPlan
from megatron_cp.dynamic_cp.runtime.packing import Sample
from megatron_cp.dynamic_cp.types import Schedule, usable_tokens
from megatron_cp.parallel.layout import layout_of
from megatron_cp.planner.scheduling import (
    evaluation_model,
    fit_token_buckets,
    is_lockstep,
    make_schedule,
    model_cost,
    most_tokens,
    sequence_parallel_size,
)
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.remedies import Case
from megatron_cp.training.batch_checks import Problem, check_same_packs
from megatron_cp.training.batches import Step, steps_to_come
from megatron_cp.training.packed.calibration import CostTracker
from megatron_cp.training.setup import Run

logger = logging.getLogger(__name__)


class FixedLengthSource:
    """A dataset of fixed-length samples as a source of samples to pack."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample."""
        return np.full(len(indices), self._length)

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[index]


class PackedSteps:
    """Steps of packed microbatches; the next step is prefetched.

    Raises:
        RuntimeFault: on every rank, if the samples or the schedule of any rank are invalid.
    """

    def __init__(
        self,
        run: Run,
        source: SampleSource,
        consumed_samples: int,
        training: bool,
        scheduler: Scheduler | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Use ``scheduler`` for ``num_steps`` steps; by default the configured ones."""
        config, model, layout = run.config, run.config.model, run.layout
        size = config.train.global_batch_size
        if not training:
            size, micro_batch_size = config.evaluation_batch
            model = evaluation_model(model, config.dist.eval_context_parallel_size, micro_batch_size)
            layout = layout_of(model, config.dist, run.all_ranks.size())
        assert run.dynamic_groups is not None
        self._run = run
        case = self._case = Case(replace(config, model=model), layout.world_size, None, Environment.detect())
        self._costs = CostTracker(run, model_cost(case), active=training)
        self._size = size
        self._scheduler: Scheduler = scheduler or partial(make_schedule, model, layout)
        steps_of_run = config.train.iterations if training else config.validation.eval_iters
        self._steps_of_run = steps_of_run if num_steps is None else num_steps
        self._plan: StepPlan | None = None
        self._batches = DynamicBatches(
            source,
            size,
            partial(_with_buckets, run, self._scheduler),
            run.dynamic_groups,
            lockstep=is_lockstep(model),
            device=run.device,
            consumed_samples=consumed_samples,
            placement=model.packed_placement,
            cost=self._costs.cost,
            longest=model.seq_length,
            num_steps=steps_to_come(run, training) if num_steps is None else num_steps,
        )

    def __next__(self) -> Step:
        problems: list[Problem] = []
        plan = None
        with self._run.phases("schedule"):
            try:
                self._fit_buckets()
                plan = next(self._batches)
            except DataError as error:
                problems.append(error)
            except (ValueError, IndexError, OSError) as error:
                problems.append(str(error))
        with self._run.phases("data"):
            check_same_packs(self._run, self._size, plan, problems)
            assert plan is not None
            microbatches = self._batches.microbatches(plan)
        self._plan = plan
        return Step(microbatches, plan.schedule.num_microbatches, plan.lengths, plan)

    def _fit_buckets(self) -> None:
        """Fit the numbers of tokens that packs are padded to, once in a run.

        Evaluation uses those of training.
        """
        run = self._run
        if run.token_buckets is not None or not run.config.model.packed_shape_buckets:
            return
        cost = self._costs.cost
        fit = fit_token_buckets(
            self._case,
            lambda lengths: self._scheduler(lengths, cost),
            self._batches.lengths,
            self._size,
            self._steps_of_run,
        )
        run.token_buckets = fit.tokens
        if run.all_ranks.rank() == 0:
            logger.info("%s", fit)

    def observe(self) -> None:
        if self._plan is not None and self._costs.observe(self._plan):
            self._batches.use_cost(self._costs.cost)

    def state_dict(self) -> dict[str, Any]:
        buckets = {"of": self._bucket_terms(), "tokens": list(self._run.token_buckets or ())}
        return self._batches.state_dict() | {"calibration": self._costs.state_dict(), "token_buckets": buckets}

    def _bucket_terms(self) -> dict[str, int]:
        """Return what saved buckets must have in common with the run."""
        model = self._case.config.model
        return {
            "number": model.packed_shape_buckets,
            "most_tokens": most_tokens(self._case),
            "sequence_parallel_size": sequence_parallel_size(model),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after the saved steps.

        Another layout or transport starts with a new cost model.
        """
        if self._costs.load_state_dict(state.get("calibration")):
            self._batches.load_state_dict(state)
            buckets, terms = state.get("token_buckets", {}), self._bucket_terms()  # none in earlier versions
            largest = usable_tokens(terms["most_tokens"], terms["sequence_parallel_size"])
            if buckets.get("of") == terms and buckets["tokens"][-1:] == [largest]:
                self._run.token_buckets = tuple(buckets["tokens"])
        else:
            self._batches.load_state_dict({"consumed_samples": state["consumed_samples"]})

    def close(self) -> None:
        self._batches.close()


def _with_buckets(run: Run, scheduler: Scheduler, lengths: Sequence[int], cost: CostModel) -> Schedule:
    """Return a schedule with the run's buckets.

    No method of :class:`PackedSteps`: a cycle of references would keep the run's groups after its end.
    """
    return replace(scheduler(lengths, cost), token_buckets=run.token_buckets or ())
