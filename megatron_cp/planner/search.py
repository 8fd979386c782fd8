"""Search of a space for the fastest layouts that fit in memory and pass the rules."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.common.errors import Violation
from megatron_cp.config.names import NAME
from megatron_cp.planner.estimator import SMALLEST_GROUP, Estimator
from megatron_cp.planner.found import Estimated, Found, Models, TooLarge, changes
from megatron_cp.planner.space import Settings, Space, with_settings
from megatron_cp.rules import refusal

_PACKING = (
    NAME.train.micro_batch_size,
    NAME.model.sequence_packing_scheduler,
    NAME.model.dynamic_context_parallel,
    NAME.model.min_dynamic_context_parallel_size,
    NAME.model.max_seqlen_per_dp_cp_rank,
)
_ATTENTION_RULES = "BCDE"  # rule sections that depend on the ranks of one CP group only
_MOST_SHOWN = 12  # most layouts reported that do not fit
_MOST_SIMULATED = 30  # most layouts whose packs are scheduled before only these are ranked, 0.1 s each
_MOST_FOR_FRONTIER = 20  # most further layouts whose packs are scheduled for the frontier
_MOST_CHECKED = 40  # most frontier layouts checked against the rules
_MOST_REFUSED = 500  # most layouts that the rules reject before any is accepted
_MOST_BASES = 100  # most bases with estimates of all memory savings


@dataclass(frozen=True, eq=False)
class _Base:
    """Layouts that differ only in transport and memory savings."""

    settings: Settings
    transports: tuple[Settings, ...]
    steps: tuple[Settings, ...]

    def at(self, step: int, transport: int = 0) -> Settings:
        return self.settings | self.transports[transport] | self.steps[step]

    @property
    def division(self) -> tuple[Any, ...]:
        return tuple(self.settings[name] for name in DIVISION)


class Search:
    """Best-first search of one space.

    Args:
        capacity: usable bytes of a GPU.
    """

    def __init__(self, space: Space, capacity: float, models: Models) -> None:
        self._space, self._capacity = space, capacity
        self._estimates = Estimator(space, models)
        self.refused: Violation | None = None  # the latest error of a rejected layout
        self._usable: dict[tuple[Any, ...], bool] = {}
        self._refinements: dict[str, float] = {}  # by settings
        self._orders: dict[tuple[Any, ...], list[int]] = {}  # transports, fastest first
        self._count = itertools.count()

    def run(self, count: int) -> Found:
        """Find the ``count`` fastest layouts, the frontier, and layouts that do not fit.

        A priority queue orders layouts by a lower bound of their step time. The first bound assumes no memory savings
        and a free transport. Removal from the queue replaces it by one with savings, and then by an estimate. Of packs
        these are estimates, a tenth too high at most in what was tried, and a schedule comes last.
        """
        queue: list[tuple[float, int, _Base, int, int]] = []

        def push(seconds: float, base: _Base, step: int = -1, transport: int = -1) -> None:
            heapq.heappush(queue, (seconds, next(self._count), base, step, transport))

        for base in self._bases():
            push(self._least_seconds(base, 0), base)
        fitting: dict[tuple[Any, ...], Estimated] = {}
        bases: list[_Base] = []
        too_large: list[tuple[float, Settings, Settings | None]] = []
        refusals = 0
        while queue and len(fitting) < count and (fitting or refusals < _MOST_REFUSED):
            seconds, _, base, step, transport = heapq.heappop(queue)
            if base.division in fitting or (transport < 0 and self._estimates.schedules >= _MOST_SIMULATED):
                continue
            if step < 0 and (refined := self._refined(base)) > seconds:
                push(refined, base)
                continue
            if step < 0:
                steps = self._steps_that_fit(base)
                if not steps:
                    too_large.append((seconds, base.at(-1), None))
                    continue
                if first := min(steps):
                    too_large.append((seconds, base.at(first - 1), base.at(steps[0])))
                bases.append(base)
                push(max(seconds, self._least_seconds(base, steps[0])), base, steps[0])
                continue
            if transport < 0:
                numbers = list(self._transports_to_estimate(base, step))
                refusals += not numbers
                for number in numbers:
                    push(self._estimates.expected_seconds(base.at(step, number)), base, step, number)
                continue
            if not self._estimates.is_quick(settings := base.at(step, transport)):
                if self._estimates.schedules < _MOST_SIMULATED:
                    push(self._estimates.time(settings).seconds, base, step, transport)
                continue
            found = self._estimates.estimated(settings)
            if found.memory.total > self._capacity:  # the transport's buffers do not fit
                steps = self._steps_that_fit(base)
                for slower in steps[steps.index(step) + 1 :][:1]:
                    push(self._estimates.expected_seconds(base.at(slower, transport)), base, slower, transport)
            elif self._accepted(found.settings):
                fitting[base.division] = found
            else:
                refusals += 1
        ranked = tuple(sorted(fitting.values(), key=lambda each: each.order))
        return Found(
            ranked,
            tuple(self._frontier(ranked, bases)),
            tuple(self._too_large(too_large, ranked)),
            self._estimates.count,
        )

    def smallest(self) -> Estimated | None:
        """Return the layout with the least memory that passes the rules."""
        needs = [(self._estimates.memory(base.at(-1)).total, next(self._count), base) for base in self._bases()]
        ordered = [base.at(-1) for _, _, base in sorted(needs, key=lambda each: each[:2])][:_MOST_REFUSED]
        return next((self._estimates.estimated(found) for found in ordered if self._accepted(found)), None)

    def _bases(self) -> Iterator[_Base]:
        for grid in self._space.grids():
            transports = tuple(each for each in self._space.transports(grid) if self._can_use(grid, each))
            for schedule in self._space.schedules(grid) if transports else ():
                if self._can_pack(grid, schedule, transports):
                    yield _Base(grid | schedule, transports, tuple(self._space.savings(grid, schedule)))

    def _least_seconds(self, base: _Base, step: int) -> float:
        """Return a lower bound of the step time, in seconds.

        Assumes enough memory and a free transport.
        """
        return self._estimates.least_seconds(base.at(step))

    def _refined(self, base: _Base) -> float:
        """Return the step's seconds without memory savings, of packs a better estimate."""
        if self._space.lengths is None:
            return self._least_seconds(base, 0)
        key = str({name: value for name, value in base.settings.items() if name != SMALLEST_GROUP})
        if key not in self._refinements:
            self._refinements[key] = self._estimates.expected_seconds(base.at(0, self._fastest(base, 0)[0]))
        return self._refinements[key]

    def _steps_that_fit(self, base: _Base) -> list[int]:
        """Return the numbers of the memory savings that fit, fastest first.

        Those with layer inputs on the host are last, and each takes more time than the one before it.
        """
        if self._estimates.memory(base.at(-1)).total > self._capacity:
            return []
        last = len(base.steps) - 1
        fitting = [step for step in range(last) if self._estimates.memory(base.at(step)).total <= self._capacity]
        on_device = [step for step in (*fitting, last) if not base.steps[step].get(NAME.model.offload_layer_inputs)]
        on_device.sort(key=lambda step: self._least_seconds(base, step))
        return on_device + [step for step in (*fitting, last) if step not in on_device]

    def _transports_to_estimate(self, base: _Base, step: int) -> Iterator[int]:
        """Yield the numbers of the transports to estimate.

        Of packs only the fastest for equal packs that the rules accept: to schedule a layout takes longer than both.
        """
        if self._space.lengths is None:
            yield from range(len(base.transports))
            return
        accepted = (number for number in self._fastest(base, step) if self._accepted(base.at(step, number)))
        yield from itertools.islice(accepted, 1)

    def _fastest(self, base: _Base, step: int) -> list[int]:
        """Return the numbers of the transports, fastest for equal packs first.

        Virtual stages and splits of layers hardly change their order.
        """
        key = (*(base.settings[name] for name in _GROUPS), str(base.steps[step]))
        if key not in self._orders:
            packs = self._estimates.seconds_of_equal_packs
            numbers = range(len(base.transports))
            self._orders[key] = sorted(numbers, key=lambda number: packs(base.at(step, number)))
        return self._orders[key]

    def _can_use(self, grid: Settings, transport: Settings) -> bool:
        """Return whether a CP group can use a transport.

        Checks a case of one CP group, so the result holds for all other settings.
        """
        tp, cp = grid[NAME.model.tensor_model_parallel_size], grid[NAME.model.context_parallel_size]
        key = (tp, cp, *map(str, transport.values()))
        if key not in self._usable:
            alone = {NAME.model.pipeline_model_parallel_size: 1, NAME.model.expert_model_parallel_size: 1}
            alone |= {NAME.train.micro_batch_size: 1, NAME.model.virtual_pipeline_model_parallel_size: None}
            case = replace(with_settings(self._space.case, grid | alone | transport), world_size=tp * cp)
            refused = refusal(case, _ATTENTION_RULES)
            self.refused = refused or self.refused
            self._usable[key] = refused is None
        return self._usable[key]

    def _can_pack(self, grid: Settings, schedule: Settings, transports: Sequence[Settings]) -> bool:
        """Return whether a transport can run a schedule's packs, whatever the savings."""
        if not schedule.get(NAME.model.dynamic_context_parallel):
            return True
        alone = {NAME.model.pipeline_model_parallel_size: 1, NAME.model.virtual_pipeline_model_parallel_size: None}
        world = self._space.case.world_size // grid[NAME.model.pipeline_model_parallel_size]
        settings = grid | {name: schedule[name] for name in _PACKING} | alone
        key = (world, *map(str, settings.values()))
        if key not in self._usable:
            cases = (replace(with_settings(self._space.case, settings | each), world_size=world) for each in transports)
            refused = [refusal(case, _ATTENTION_RULES) for case in cases]
            self.refused = refused[0] or self.refused
            self._usable[key] = None in refused
        return self._usable[key]

    def _accepted(self, settings: Settings) -> bool:
        refused = refusal(self._estimates.case(settings))
        if refused is None:
            return True
        self.refused = refused
        return False

    def _frontier(self, fitting: Sequence[Estimated], bases: Sequence[_Base]) -> Iterator[Estimated]:
        """Yield the Pareto frontier of time and memory, fastest first.

        A time is estimated only where memory is below that of all faster layouts.
        """
        accepted, checked, least = {str(each.settings) for each in fitting}, 0, 0.99 * self._capacity
        queue: list[tuple[Any, int, float, tuple[_Base, int] | Settings | Estimated]] = []

        def push(order: Any, memory: float, found: tuple[_Base, int] | Settings | Estimated) -> None:
            heapq.heappush(queue, (order, next(self._count), memory, found))

        for base in bases[:_MOST_BASES]:
            for step in range(len(base.steps)):
                if (memory := self._estimates.memory(base.at(step)).total) < 0.98 * least:
                    push((self._least_seconds(base, step),), memory, (base, step))
        for each in fitting:
            push(each.order, each.memory.total, each)
        while queue and checked < _MOST_CHECKED:
            _, _, memory, found = heapq.heappop(queue)
            if memory >= 0.98 * least:
                continue
            exhausted = self._estimates.schedules >= _MOST_SIMULATED + _MOST_FOR_FRONTIER
            if isinstance(found, tuple):
                for number in () if exhausted else self._transports_to_estimate(*found):
                    settings = found[0].at(found[1], number)
                    push(
                        (self._estimates.expected_seconds(settings),), self._estimates.memory(settings).total, settings
                    )
                continue
            if not isinstance(found, Estimated):
                if self._estimates.is_quick(found) or not exhausted:
                    each = self._estimates.estimated(found)
                    push(each.order, memory, each)
                continue
            if str(found.settings) not in accepted:
                checked += 1
                if not self._accepted(found.settings):
                    continue
            least = memory
            yield found

    def _too_large(
        self, found: Sequence[tuple[float, Settings, Settings | None]], fitting: Sequence[Estimated]
    ) -> Sequence[TooLarge]:
        """Return layouts that do not fit, one per division, fastest first.

        found: lower bound of the seconds, settings, and settings that fit.
        """
        shown: dict[tuple[Any, ...], TooLarge] = {}
        for _, settings, remedy in sorted(found[:_MOST_BASES], key=lambda each: each[0]):
            division = tuple(settings[name] for name in DIVISION)
            if division not in shown and len(shown) < _MOST_SHOWN and self._accepted(settings):
                near = sorted((other.settings for other in fitting), key=_changes(settings))
                shown[division] = TooLarge(self._estimates.estimated(settings), remedy or next(iter(near), None))
        return sorted(shown.values(), key=lambda each: each.layout.order)


def _changes(settings: Settings) -> Callable[[Settings], int]:
    return lambda other: len(changes(settings, other))


_GROUPS = (
    NAME.model.tensor_model_parallel_size,
    NAME.model.sequence_parallel,
    NAME.model.pipeline_model_parallel_size,
    NAME.model.context_parallel_size,
    NAME.model.expert_model_parallel_size,
    NAME.model.expert_tensor_parallel_size,
)
DIVISION = (
    NAME.model.tensor_model_parallel_size,
    NAME.model.pipeline_model_parallel_size,
    NAME.model.context_parallel_size,
    NAME.model.expert_model_parallel_size,
)
