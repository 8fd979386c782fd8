"""Recorded schedules of a run, one a line and step in the run folder. Pure."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_cp.common.input_files import parse_json
from megatron_cp.common.jsonl_log import METRICS, SCHEDULES, numbered_lines, read_lines
from megatron_cp.config.names import NAME
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.types import Group, Schedule
from megatron_cp.parallel.layout import MOST_RANKS

if TYPE_CHECKING:
    from megatron_cp.dynamic_cp.runtime.iterator import StepPlan


@dataclass(frozen=True)
class RecordedStep:
    """One step of a run: schedule, cost model, and measured time.

    context_parallel_size: the configured one. The three fields after it are arguments of
    :func:`megatron_cp.dynamic_cp.schedule`.
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


_LONGEST_STEP = 1e9  # seconds
_MOST = {"num_ranks": MOST_RANKS, "max_seqlen_per_rank": 2**31 - 1, "sequence_parallel_size": MOST_RANKS}
# Optional: not recorded by older versions.
_SETTINGS = ("context_parallel_size", "microbatch_multiple", "sync_ranks", "pipeline_size")


def record(step: StepPlan | RecordedStep, **settings: int) -> dict[str, Any]:
    """Convert a step to plain types.

    A group is [first rank, number of ranks, [sample ids]], with ids counted in the step. ``settings``: fields of
    :class:`RecordedStep`.
    """
    schedule = step.schedule
    return {
        "num_ranks": schedule.num_ranks,
        "max_seqlen_per_rank": schedule.max_seqlen_per_rank,
        "sequence_parallel_size": schedule.sequence_parallel_size,
        "token_buckets": list(schedule.token_buckets),
        "lengths": list(step.lengths),
        "microbatches": [
            [[group.ranks[0], group.cp_size, list(group.sample_ids)] for group in groups]
            for groups in schedule.microbatches
        ],
        "cost": asdict(step.cost),
        **settings,
    }


def read_step(folder: Path, iteration: int | None = None) -> RecordedStep:
    """Read a step of the run in ``folder``; by default its last one.

    Raises:
        ValueError: the step is not recorded, or damaged.
    """
    path = folder / SCHEDULES
    if not os.path.isfile(path):  # unlike Path.is_file, never raises
        raise ValueError(
            f"{path}: no such file. Only runs with {NAME.model.sequence_packing_scheduler} write one into their folder"
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
        return _step(parse_json(found), _measured_seconds(folder / METRICS, wanted))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _measured_seconds(metrics: Path, iteration: int) -> float | None:
    lines = read_lines(metrics) if os.path.isfile(metrics) else []
    seconds: Any = {line["iteration"]: line["step_time_s"] for line in lines if "step_time_s" in line}.get(iteration)
    return float(seconds) if type(seconds) in (int, float) and 0 < seconds < _LONGEST_STEP else None


def _step(values: dict[str, Any], seconds: float | None) -> RecordedStep:
    _check(values)
    microbatches = [
        [Group(tuple(range(first, first + size)), tuple(ids)) for first, size, ids in groups]
        for groups in values["microbatches"]
    ]
    schedule = Schedule(
        values["num_ranks"],
        values["max_seqlen_per_rank"],
        microbatches,
        values["sequence_parallel_size"],
        tuple(values.get("token_buckets", ())),  # not recorded by older versions
    )
    settings = {name: values[name] for name in _SETTINGS if name in values}
    cost = CostModel(**values["cost"])
    return RecordedStep(values["iteration"], schedule, tuple(values["lengths"]), cost, seconds, **settings)


def _check(values: dict[str, Any]) -> None:
    """Check a line's types and ranges; raises ValueError and KeyError."""
    for name, most in (_MOST | dict.fromkeys(_SETTINGS, MOST_RANKS)).items():
        if name in _MOST or name in values:
            _check_number(values[name], name, 1, most)
    lengths, ranks = values["lengths"], values["num_ranks"]
    for length in lengths:
        _check_number(length, "lengths", 1, 2**31 - 1)
    for tokens in values.get("token_buckets", ()):
        _check_number(tokens, "token_buckets", 1, 2**31 - 1)
    seen: list[int] = []
    for groups in values["microbatches"]:
        for first, size, ids in groups:
            _check_number(first, "the first rank of a group", 0, ranks - 1)
            _check_number(size, "the ranks of a group", 1, ranks - first)
            seen += ids
    if not lengths or sorted(seen) != list(range(len(lengths))):
        raise ValueError("is damaged: its microbatches do not contain each sample once")
    if not isinstance(values["cost"], dict):
        raise ValueError("is damaged: cost is not a mapping")


def _check_number(value: Any, name: str, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"is damaged: {name}={str(value)[:40]} is not a whole number from {least} to {most}")
