"""The cost model fitted to this run's own step times, and the same on every rank.

During the first iterations each rank's working time is gathered by all; at the end of them rank 0 fits the model and
all ranks take over its numbers. From then on the model stays as it is, and it is saved with every checkpoint, so that
a resumed run makes the same schedules as one that was never stopped.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.dynamic_cp.calibration import Calibrator
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.iterator import StepPlan
from megatron_cp.training.setup import Run
from megatron_cp.training.work_clock import WorkClock

logger = logging.getLogger(__name__)

WARM_UP = 2  # iterations that allocate, compile and connect


class CostTracker:
    """The cost model in use. Collective over the run's ranks.

    Only where ranks run independently does a rank's time tell what its own microbatches cost: without pipeline stages
    and expert parallelism. Otherwise the model derived from the shape stays.
    """

    def __init__(self, run: Run, prior: CostModel, active: bool) -> None:
        model = run.config.model
        independent = model.pipeline_model_parallel_size == 1 and model.expert_model_parallel_size == 1
        self._run = run
        self._prior = prior
        self.cost = prior
        self._last = model.dynamic_context_parallel_calibration_iters if active and independent else 0
        self._layout = [run.all_ranks.size(), model.tensor_model_parallel_size, model.pipeline_model_parallel_size]
        self._observed: list[tuple[list[tuple[list[int], int]], float]] = []
        if run.progress.iteration < self._last:
            run.work_clock = WorkClock()

    def observe(self, plan: StepPlan) -> bool:
        """Take in the last step's time; whether :attr:`cost` has changed."""
        iteration, clock = self._run.progress.iteration, self._run.work_clock
        if clock is None or iteration <= WARM_UP:
            return False
        group, seconds = self._run.all_ranks, clock.seconds
        assert self._run.dynamic_groups is not None
        mine = torch.tensor([self._run.dynamic_groups.position, seconds], dtype=torch.float64, device=self._run.device)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        times: dict[int, float] = {}
        for position, measured in torch.stack(everyone).tolist():
            times[int(position)] = max(times.get(int(position), 0.0), measured)
        for position, measured in sorted(times.items()):
            work = [
                ([plan.lengths[i] for i in group.sample_ids], group.cp_size)
                for group in plan.schedule.groups_of(position)
                if group is not None
            ]
            if work:
                self._observed.append((work, measured))
        if iteration < self._last:
            return False
        self._run.work_clock = None
        self._fit()
        return True

    def _fit(self) -> None:
        group = self._run.all_ranks
        found: list[Any] = [None]
        if group.rank() == 0:
            calibrator = Calibrator(self._prior, window=max(1, len(self._observed)))
            for work, seconds in self._observed:
                calibrator.observe(work, seconds)
            fit = calibrator.fit()
            found = [asdict(fit.cost)]
            logger.info(
                "cost model calibrated: predictions of a rank's step time are off by %.0f%% (before: %.0f%%), median "
                "of %d observations",
                100 * fit.residual,
                100 * fit.prior_residual,
                fit.observations,
            )
        dist.broadcast_object_list(found, src=dist.get_process_group_ranks(group)[0], group=group)
        self.cost = CostModel(**found[0])
        self._observed.clear()

    def state_dict(self) -> dict[str, Any]:
        """What to save, in plain types."""
        return {"layout": self._layout, "cost": asdict(self.cost), "observed": list(self._observed)}

    def load_state_dict(self, state: dict[str, Any] | None) -> bool:
        """Take over a saved model; False, and nothing changes, where it was made in another layout."""
        if state is None or state["layout"] != self._layout:
            return False
        self.cost = CostModel(**state["cost"])
        self._observed = list(state["observed"])
        return True
