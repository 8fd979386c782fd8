"""Estimators and results of a layout search. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.estimate.device import Device
from megatron_cp.estimate.job import Job, MemoryEstimate, TimeEstimate
from megatron_cp.estimate.memory import memory_estimate
from megatron_cp.estimate.prices import prices
from megatron_cp.estimate.time import time_estimate
from megatron_cp.planner.space import Settings


@dataclass(frozen=True)
class Models:
    """Estimators of the memory and time of a step, and of a scheduler's costs.

    alone: time of a step as if ranks shared no cores.
    prices: cost model of packs of a job with samples of up to a number of tokens.
    cores: processor cores that the ranks of a node share; 0 if each rank has a device of its own.
    """

    memory: Callable[[Job], MemoryEstimate]
    time: Callable[[Job], TimeEstimate]
    alone: Callable[[Job], TimeEstimate]
    prices: Callable[[Job, int], CostModel]
    cores: int

    @classmethod
    def on(cls, device: Device, gpus_per_node: int) -> Models:
        """Return the estimators for a device."""
        own = replace(device, cores=0)
        return cls(
            memory_estimate,
            lambda job: time_estimate(job, device, gpus_per_node),
            lambda job: time_estimate(job, own, gpus_per_node),
            lambda job, longest: prices(job, longest, device, gpus_per_node),
            device.cores,
        )


@dataclass(frozen=True)
class Estimated:
    """A layout with its estimates.

    If the layout does not fit, ``time`` assumes a GPU with enough memory.
    """

    settings: Settings
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def order(self) -> tuple[float, float, str]:
        return self.time.seconds, self.memory.total, str(self.settings)


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit.

    remedy: settings of a similar layout that fits, None if there is none.
    """

    layout: Estimated
    remedy: Settings | None


@dataclass(frozen=True)
class Found:
    """Layouts found by a search, each list fastest first. All pass the rules.

    A division is a combination of tensor, pipeline, context and expert parallel sizes.

    fitting: the fastest layout of each division.
    frontier: the Pareto frontier of time and memory.
    too_large: fast layouts that do not fit, one per division.
    examined: number of estimates.
    """

    fitting: tuple[Estimated, ...]
    frontier: tuple[Estimated, ...]
    too_large: tuple[TooLarge, ...]
    examined: int


def changes(settings: Settings, other: Settings) -> Settings:
    """Return the settings of ``other`` that differ from ``settings``."""
    return {name: value for name, value in other.items() if settings.get(name) != value}
