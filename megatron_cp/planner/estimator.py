"""Estimates of a search's layouts, from their settings."""

from __future__ import annotations

from megatron_cp.attention.transports.registry import ALL_TO_ALL
from megatron_cp.config.names import NAME
from megatron_cp.estimate.job import Job, MemoryEstimate, TimeEstimate
from megatron_cp.planner.found import Estimated, Models
from megatron_cp.planner.packed import least_seconds, packed_job, packed_time, quick_seconds
from megatron_cp.planner.space import Settings, Space, with_settings
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

_WHOLE = {NAME.model.cp_comm_type: ALL_TO_ALL.name, NAME.model.hierarchical_context_parallel_sizes: None}
SMALLEST_GROUP = NAME.model.min_dynamic_context_parallel_size  # hardly changes the time


class Estimator:
    """Estimates the layouts of a space, given by their settings.

    Attributes:
        count: number of estimates.
    """

    def __init__(self, space: Space, models: Models) -> None:
        self._space, self._models, self.count = space, models, 0
        self._bounds: dict[str, float] = {}  # by settings, as the others
        self._of_schedules: dict[str, TimeEstimate] = {}

    @property
    def schedules(self) -> int:
        """Number of layouts whose packs were scheduled."""
        return len(self._of_schedules)

    def case(self, settings: Settings) -> Case:
        return with_settings(self._space.case, settings)

    def estimated(self, settings: Settings) -> Estimated:
        """Estimate the memory and time of a layout."""
        return Estimated(settings, self.memory(settings), self.time(settings))

    def memory(self, settings: Settings) -> MemoryEstimate:
        self.count += 1
        return self._models.memory(self._job(settings))

    def time(self, settings: Settings) -> TimeEstimate:
        """Estimate the time of a step, of packs by a schedule."""
        self.count += 1
        if self._space.lengths is None:
            return self._models.time(self._job(settings))
        key = str(settings)
        if key not in self._of_schedules:
            self._of_schedules[key] = packed_time(self.case(settings), self._space.lengths, self._models)
        return self._of_schedules[key]

    def is_quick(self, settings: Settings) -> bool:
        """Return whether :meth:`time` needs no schedule."""
        return self._space.lengths is None or str(settings) in self._of_schedules

    def expected_seconds(self, settings: Settings) -> float:
        """Return the step time, of packs without a schedule an estimate of it."""
        if self._space.lengths is None or self.is_quick(settings):
            return self.time(settings).seconds
        self.count += 1
        return quick_seconds(self.case(settings), self._space.lengths, self._models)

    def least_seconds(self, settings: Settings) -> float:
        """Return a lower bound of the step time, in seconds.

        Of packs an estimate that is nearly always lower. Assumes a free transport that does not divide attention over
        the sequence.
        """
        whole = settings | (_WHOLE if settings[NAME.model.context_parallel_size] > 1 else {})
        key = str({name: value for name, value in whole.items() if name != SMALLEST_GROUP})
        if key not in self._bounds:
            self._bounds[key] = self._bound(whole)
        return self._bounds[key]

    def _bound(self, settings: Settings) -> float:
        if self._space.lengths is not None:
            self.count += 1
            return least_seconds(self.case(settings), self._space.lengths, self._models.time)
        time = self.time(settings)
        return time.seconds - time.kinds.get("exposed cp", 0.0)

    def seconds_of_equal_packs(self, settings: Settings) -> float:
        return self._models.time(packed_job(self.case(settings), self._space.lengths or ())).seconds

    def _job(self, settings: Settings) -> Job:
        job = job_of(self.case(settings))
        assert job is not None  # recipes of a plan have a vocabulary size
        return job
