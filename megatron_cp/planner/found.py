"""What a search uses and finds. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_cp.estimate.job import Job, MemoryEstimate, TimeEstimate
from megatron_cp.planner.space import Settings


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
class TooLarge:
    """A layout that does not fit, with the settings of a like one that does; None where none does."""

    layout: Estimated
    remedy: Settings | None


@dataclass(frozen=True)
class Found:
    """What a search found. The rules accept all of these layouts.

    fitting: the fastest layout of each division of the ranks, fastest first.
    frontier: layouts that are faster than all others that need as little memory; fastest first.
    too_large: layouts that do not fit and would be fast, one of each division; fastest first.
    examined: estimates that were made.
    """

    fitting: tuple[Estimated, ...]
    frontier: tuple[Estimated, ...]
    too_large: tuple[TooLarge, ...]
    examined: int


def changes(settings: Settings, other: Settings) -> Settings:
    """Return the settings of ``other`` that differ."""
    return {name: value for name, value in other.items() if settings.get(name) != value}
