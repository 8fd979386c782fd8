"""Rank the layouts of a space by estimated step time, among those that fit in memory and that the rules accept."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.estimate.job import Job, MemoryEstimate, TimeEstimate
from megatron_cp.planner.space import Settings, Space, with_settings
from megatron_cp.rules import refusal
from megatron_cp.rules.job import job_of
from megatron_cp.rules.remedies import Case

_ATTENTION_RULES = "BCDE"  # sections that a group of attention's ranks decides by itself
_MOST_CHECKED = 60  # further layouts of a kind that the rules are asked about


@dataclass(frozen=True)
class Models:
    """What estimates a step's memory and time."""

    memory: Callable[[Job], MemoryEstimate]
    time: Callable[[Job], TimeEstimate]


@dataclass(frozen=True)
class Estimated:
    """A layout with its estimates; ``time`` is that of a GPU with memory enough where it does not fit."""

    settings: Settings
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def order(self) -> tuple[float, float, str]:
        return self.time.seconds, self.memory.total, str(self.settings)


@dataclass(frozen=True)
class Found:
    """What a search found.

    fitting: the fastest layouts, fastest first.
    frontier: layouts that are faster than all others that need as little memory; fastest first.
    too_large: of each division of the ranks that does not fit what saves most; the least missing memory first.
    examined: layouts of which memory or time was estimated.
    """

    fitting: tuple[Estimated, ...]
    frontier: tuple[Estimated, ...]
    too_large: tuple[Estimated, ...]
    examined: int


@dataclass(frozen=True)
class _Option:
    """A layout at one of its steps of saving memory."""

    base: Settings
    steps: tuple[Settings, ...]
    step: int

    @property
    def settings(self) -> Settings:
        return self.base | self.steps[self.step]


class Search:
    """A search of one space.

    Args:
        capacity: bytes of a GPU that may be used.
    """

    def __init__(self, space: Space, capacity: float, models: Models) -> None:
        self._space, self._capacity, self._models = space, capacity, models
        self._examined = 0
        self._usable: dict[tuple[Any, ...], bool] = {}

    def run(self, count: int) -> Found:
        """Find the ``count`` fastest layouts, and what else is worth knowing."""
        options, too_large = self._fitting_options()
        queue = [(self._time(option.settings).seconds, number, option) for number, option in enumerate(options)]
        heapq.heapify(queue)
        estimated: list[tuple[float, int, _Option]] = []
        fitting: list[Estimated] = []
        while queue and len(fitting) < count:
            seconds, number, option = heapq.heappop(queue)
            found = self.estimate(option.settings)
            if found.memory.total > self._capacity:  # another transport's buffers fitted, its own do not
                if option.step + 1 < len(option.steps):
                    option = replace(option, step=option.step + 1)
                    heapq.heappush(queue, (self._time(option.settings).seconds, number, option))
                continue
            estimated.append((seconds, number, option))
            if self._accepted(found.settings):
                fitting.append(found)
        rest = sorted([*estimated, *queue], key=lambda each: each[:2])
        return Found(
            tuple(fitting),
            tuple(self._frontier(fitting, [option for _, _, option in rest])),
            tuple(self._least_missing(too_large, count)),
            self._examined,
        )

    def smallest(self) -> Estimated | None:
        """Return the layout that needs least memory, of those that the rules accept."""
        needs = sorted(
            ((self._memory(settings).total, number, settings) for number, settings in enumerate(self._thriftiest())),
            key=lambda each: each[:2],
        )
        return next((self.estimate(found) for _, _, found in needs if self._accepted(found)), None)

    def estimate(self, settings: Settings) -> Estimated:
        """Estimate memory and time of a layout."""
        return Estimated(settings, self._memory(settings), self._time(settings))

    def _bases(self) -> Iterator[tuple[list[Settings], tuple[Settings, ...]]]:
        """Layouts that differ in the transport alone, with their steps of saving memory."""
        for grid in self._space.grids():
            transports = [each for each in self._space.transports(grid) if self._can_use(grid, each)]
            for schedule in self._space.schedules(grid) if transports else ():
                steps = self._space.savings(grid, schedule)
                yield [grid | schedule | each for each in transports], tuple(steps)

    def _thriftiest(self) -> Iterator[Settings]:
        for bases, steps in self._bases():
            yield bases[0] | steps[-1]

    def _fitting_options(self) -> tuple[list[_Option], list[tuple[float, Settings]]]:
        """Layouts at the first step that fits, and of the others how much memory their last step needs."""
        options, too_large = [], []
        for bases, steps in self._bases():
            least = self._memory(bases[0] | steps[-1]).total
            if least > self._capacity:
                too_large.append((least, bases[0] | steps[-1]))
                continue
            sizes = (self._memory(bases[0] | step).total for step in steps[:-1])
            first = next((number for number, size in enumerate(sizes) if size <= self._capacity), len(steps) - 1)
            options += [_Option(base, steps, first) for base in bases]
        return options, too_large

    def _can_use(self, grid: Settings, transport: Settings) -> bool:
        """Whether attention's ranks can use a transport, whatever else the layout is."""
        tp, cp = grid[NAME.model.tensor_model_parallel_size], grid[NAME.model.context_parallel_size]
        key = (tp, cp, *map(str, transport.values()))
        if key not in self._usable:
            alone = {NAME.model.pipeline_model_parallel_size: 1, NAME.model.expert_model_parallel_size: 1}
            alone |= {NAME.train.micro_batch_size: 1, NAME.model.virtual_pipeline_model_parallel_size: None}
            case = replace(with_settings(self._space.case, grid | alone | transport), world_size=tp * cp)
            self._usable[key] = refusal(case, _ATTENTION_RULES) is None
        return self._usable[key]

    def _case(self, settings: Settings) -> Case:
        return with_settings(self._space.case, settings)

    def _job(self, settings: Settings) -> Job:
        self._examined += 1
        job = job_of(self._case(settings))
        assert job is not None  # the request has a vocabulary
        return job

    def _memory(self, settings: Settings) -> MemoryEstimate:
        return self._models.memory(self._job(settings))

    def _time(self, settings: Settings) -> TimeEstimate:
        return self._models.time(self._job(settings))

    def _accepted(self, settings: Settings) -> bool:
        return refusal(self._case(settings)) is None

    def _frontier(self, fitting: list[Estimated], options: list[_Option]) -> Iterator[Estimated]:
        """Walk from the fastest to slower layouts, and keep those that need less memory than all before."""
        accepted, checked, least = {str(each.settings) for each in fitting}, 0, float("inf")
        steps = [
            replace(option, step=step) for option in options[:_MOST_CHECKED] for step in range(option.step, len(option.steps))
        ]
        found = [self.estimate(option.settings) for option in steps]
        for each in sorted(found, key=lambda each: each.order):
            if each.memory.total >= 0.98 * least or each.memory.total > self._capacity or checked == _MOST_CHECKED:
                continue
            if str(each.settings) not in accepted:
                checked += 1
                if not self._accepted(each.settings):
                    continue
            least = each.memory.total
            yield each

    def _least_missing(self, too_large: list[tuple[float, Settings]], count: int) -> Iterator[Estimated]:
        """The layouts of distinct divisions of the ranks that need least."""
        seen: set[tuple[Any, ...]] = set()
        for _, settings in sorted(too_large, key=lambda each: (each[0], str(each[1]))):
            division = tuple(settings[name] for name in DIVISION)
            if division not in seen and len(seen) < count and self._accepted(settings):
                seen.add(division)
                yield self.estimate(settings)


DIVISION = (
    NAME.model.tensor_model_parallel_size,
    NAME.model.pipeline_model_parallel_size,
    NAME.model.context_parallel_size,
    NAME.model.expert_model_parallel_size,
)
