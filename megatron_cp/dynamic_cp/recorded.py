"""The schedules that a run really used, a line a step in its folder, and back again. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.types import Group, Schedule
from megatron_cp.run_lines import METRICS, SCHEDULES, numbered_lines, read_lines


class Scheduled(Protocol):
    """A scheduled step, such as a ``StepPlan``."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def cost(self) -> CostModel: ...


@dataclass(frozen=True)
class RecordedStep:
    """One step of a run: what was scheduled, the cost model that it was scheduled with, and how long the step took.

    context_parallel_size: the configured one. The three after it are those of :func:`megatron_cp.dynamic_cp.schedule`.
    """

    iteration: int
    schedule: Schedule
    lengths: tuple[int, ...]
    cost: CostModel
    measured_seconds: float | None = None
    context_parallel_size: int = 1
    microbatch_multiple: int = 1
    sync_ranks: int = 1
    pipeline_size: int = 1


# What runs of older versions have not recorded.
_SETTINGS = ("context_parallel_size", "microbatch_multiple", "sync_ranks", "pipeline_size")


def record(step: Scheduled, **settings: int) -> dict[str, Any]:
    """A step in plain types; a group is [first rank, number of ranks, [sample ids]] with ids counted in the step.

    ``settings`` are those of :class:`RecordedStep`.
    """
    schedule = step.schedule
    return {
        "num_ranks": schedule.num_ranks,
        "max_seqlen_per_rank": schedule.max_seqlen_per_rank,
        "sequence_parallel_size": schedule.sequence_parallel_size,
        "lengths": list(step.lengths),
        "microbatches": [
            [[group.ranks[0], group.cp_size, list(group.sample_ids)] for group in groups]
            for groups in schedule.microbatches
        ],
        "cost": asdict(step.cost),
        **settings,
    }


def read_step(folder: Path, iteration: int | None = None) -> RecordedStep:
    """A step of the run in ``folder``; by default its last one.

    Raises:
        ValueError: the run has recorded no such step, or a damaged one.
    """
    path = folder / SCHEDULES
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file. Runs with model.sequence_packing_scheduler write one into their folder"
        )
    try:
        first, last, found = None, None, None
        for number, line in numbered_lines(path):
            first = number if first is None else min(first, number)
            last = number if last is None else max(last, number)
            if number == (last if iteration is None else iteration):
                found = line
        if last is None:
            raise ValueError("no step has been recorded yet")
        wanted = last if iteration is None else iteration
        if found is None:
            raise ValueError(f"has no iteration {wanted}, only {first} to {last}")
        return _step(json.loads(found), _measured_seconds(folder / METRICS, wanted))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _measured_seconds(metrics: Path, iteration: int) -> float | None:
    lines = read_lines(metrics) if metrics.is_file() else []
    return {line["iteration"]: line["step_time_s"] for line in lines if "step_time_s" in line}.get(iteration)


def _step(values: dict[str, Any], seconds: float | None) -> RecordedStep:
    microbatches = [
        [Group(tuple(range(first, first + size)), tuple(ids)) for first, size, ids in groups]
        for groups in values["microbatches"]
    ]
    schedule = Schedule(
        values["num_ranks"], values["max_seqlen_per_rank"], microbatches, values["sequence_parallel_size"]
    )
    settings = {name: values[name] for name in _SETTINGS if name in values}
    cost = CostModel(**values["cost"])
    return RecordedStep(values["iteration"], schedule, tuple(values["lengths"]), cost, seconds, **settings)
