"""Fit the cost model to this run's step times, equally on every rank.

During the first iterations all ranks' working times are gathered. Rank 0 then fits the model and broadcasts the result,
which stays fixed. The model is saved with every checkpoint, so a resumed run makes the same schedules. In another
layout, or on another device, the saved numbers are invalid, and the run calibrates again.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.dynamic_cp.calibration import Calibrator
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.runtime.iterator import StepPlan
from megatron_cp.parallel.collectives import broadcast_object, gather_objects
from megatron_cp.planner.scheduling import is_lockstep
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.job import device_of
from megatron_cp.training.monitor.work_clock import WorkClock
from megatron_cp.training.setup import Run

logger = logging.getLogger(__name__)

WARM_UP = 2  # first iterations of a process: allocate, compile, connect
_NOT_IN_OLDER = ("transport", "ranks_per_node", "device")  # states of older versions
_PLACEMENT_OF_OLDER = {"placement": "zigzag"}
POOR_FIT = 0.3  # median relative error above which schedules may be unbalanced


class CostTracker:
    """The cost model in use. Collective over the run's ranks.

    Step times measure a rank's own microbatches only where ranks run independently: without pipeline stages and shared
    experts. Otherwise the model derived from the shape stays in use.
    """

    def __init__(self, run: Run, prior: CostModel, active: bool) -> None:
        model = run.config.model
        self._run = run
        # Every rank needs the same bits, and CPUs of different kinds round differently: rank 0's numbers are used.
        prior, device = broadcast_object((prior, device_of(Environment.detect()).name), run.all_ranks)
        self._prior = prior
        self.cost = prior
        self._first = run.progress.iteration
        iterations = model.dynamic_context_parallel_calibration_iters if active and not is_lockstep(model) else 0
        self._needed = max(1, iterations - WARM_UP) if iterations else 0
        # A saved model holds only for these. The prior does not count: a new version may derive other numbers.
        self._valid_for = {
            "ranks": run.all_ranks.size(),
            "tp": model.tensor_model_parallel_size,
            "pp": model.pipeline_model_parallel_size,
            "ep": model.expert_model_parallel_size,
            "etp": model.expert_tensor_parallel_size,
            "cp_comm_type": model.cp_comm_type,
            "transport": prior.transport,
            "placement": prior.placement,
            "ranks_per_node": prior.ranks_per_node,
            "device": device,
        }
        self._measured = 0  # iterations
        self._observed: list[tuple[list[tuple[list[int], int]], float]] = []
        if self._needed:
            run.work_clock = WorkClock()

    def observe(self, plan: StepPlan) -> bool:
        """Record the time of the last step; return whether :attr:`cost` has changed."""
        clock = self._run.work_clock
        if clock is None or self._run.progress.iteration <= self._first + WARM_UP:
            return False
        assert self._run.dynamic_groups is not None
        times: dict[int, float] = {}
        own = self._run.dynamic_groups.position, clock.seconds
        for position, measured in gather_objects(own, self._run.all_ranks):
            times[position] = max(times.get(position, 0.0), measured)
        for position, measured in sorted(times.items()):
            work = [
                ([plan.lengths[i] for i in group.sample_ids], group.cp_size)
                for group in plan.schedule.groups_of(position)
                if group is not None
            ]
            if work:
                self._observed.append((work, measured))
        self._measured += 1
        if self._measured < self._needed:
            return False
        self._run.work_clock = None
        self._fit()
        return True

    def _fit(self) -> None:
        found = self._prior
        if self._run.all_ranks.rank() == 0:
            calibrator = Calibrator(self._prior, window=max(1, len(self._observed)))
            for work, seconds in self._observed:
                calibrator.observe(work, seconds)
            fit = calibrator.fit()
            found = fit.cost
            logger.info(
                "cost model calibrated: median error of a rank's step time %.0f%% (before: %.0f%%), %d observations; "
                "steps take %.2g times the assumed time",
                100 * fit.residual,
                100 * fit.prior_residual,
                fit.observations,
                fit.scale,
            )
            if fit.residual > POOR_FIT or fit.at_bound:
                logger.warning(
                    "cost model: poor fit, schedules may be slow (median error %.0f%%, coefficients at limit: %s). "
                    f"Set {NAME.model.dynamic_context_parallel_calibration_iters}=0 to silence this warning",
                    100 * fit.residual,
                    ", ".join(fit.at_bound) or "none",
                )
        self.cost = broadcast_object(found, self._run.all_ranks)
        self._observed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, in plain types."""
        return {
            "of": self._valid_for,
            "cost": asdict(self.cost),
            "measured": self._measured,
            "observed": list(self._observed),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> bool:
        """Take over a saved model and its measurements.

        Returns:
            False, with nothing changed, if the saved model does not fit this run.
        """
        if state is None or not self._holds(state.get("of", {})):
            return False
        self.cost = CostModel(**state["cost"])
        self._measured, self._observed = state["measured"], list(state["observed"])
        if self._measured >= self._needed:
            self._run.work_clock = None
        return True

    def _holds(self, of: dict[str, Any]) -> bool:
        """Return whether a model saved with ``of`` holds for this run.

        Older versions saved the prior instead of the transport, the ranks per node and the device.
        """
        of = _PLACEMENT_OF_OLDER | of
        if "prior" in of:
            older = {name: value for name, value in self._valid_for.items() if name not in _NOT_IN_OLDER}
            return older == {name: value for name, value in of.items() if name != "prior"}
        return of == self._valid_for
