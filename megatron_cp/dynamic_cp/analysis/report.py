"""Figures of a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_cp.dynamic_cp.analysis.simulate import SimulatedStep, seconds_of_groups, simulate
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.dynamic_cp.types import Schedule, as_arrays, in_buckets


@dataclass(frozen=True)
class ScheduleReport:
    """Figures of one schedule under a cost model.

    seconds: simulated step. imbalance: see :func:`imbalance_of_work`; runs log the same number. useful, overhead, idle:
    shares of all ranks' time for bare work, communication and fixed costs, and waiting. padding: padding tokens per
    real token. cp_sizes: groups and tokens by CP size. idle_slots: (rank, microbatch) pairs without a group.
    """

    title: str
    step: SimulatedStep
    seconds: float
    imbalance: float
    useful: float
    overhead: float
    idle: float
    padding: float
    num_microbatches: int
    idle_slots: int
    cp_sizes: dict[int, tuple[int, int]]

    def as_dict(self) -> dict[str, object]:
        """Return the figures as plain data."""
        names = ("imbalance", "useful", "overhead", "idle", "padding", "num_microbatches", "idle_slots")
        sizes = {str(size): {"groups": g, "tokens": t} for size, (g, t) in self.cp_sizes.items()}
        figures = {name: getattr(self, name) for name in names}
        return {"simulated_seconds": self.seconds} | figures | {"cp_sizes": sizes}


def cp_sizes(schedule: Schedule) -> dict[int, int]:
    """Count the groups of each size in the domain."""
    return dict(sorted(Counter(group.cp_size for groups in schedule.microbatches for group in groups).items()))


def padding_fraction(schedule: Schedule, lengths: Sequence[int] | np.ndarray, placement: str = "zigzag") -> float:
    """Return padding tokens per real token."""
    tokens, ranks = rank_tokens(schedule, lengths, placement)
    real = int(np.asarray(lengths, dtype=np.int64).sum())
    return int(tokens @ ranks) / real - 1 if len(ranks) else 0.0


def rank_tokens(
    schedule: Schedule, lengths: Sequence[int] | np.ndarray, placement: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return each group's tokens on a rank, padding included, and its ranks.

    The same as :func:`megatron_cp.dynamic_cp.types.padded_tokens`, for all groups at once: int64 [groups].
    """
    groups, ids = as_arrays(schedule)
    real, ranks, width = np.asarray(lengths, dtype=np.int64)[ids], groups[:, 2], schedule.sequence_parallel_size
    if not ids.size:
        return ranks, ranks
    starts = np.cumsum(groups[:, 3]) - groups[:, 3]
    unit = np.repeat(ranks, groups[:, 3]) * (2 * width)
    tokens = np.add.reduceat(-(-real // unit), starts) * (2 * width)
    if placement == "balanced":
        placed = -(-np.add.reduceat(real, starts) // (ranks * width)) * width
        tokens = np.where(ranks > 1, placed, tokens)
    return in_buckets(tokens, schedule.token_buckets), ranks


def imbalance_of_work(schedule: Schedule, lengths: Sequence[int] | np.ndarray, cost: CostModel) -> float:
    """Return the most loaded rank's work over the mean work, in the model's seconds."""
    work = np.zeros(schedule.num_ranks)
    groups = (group for groups in schedule.microbatches for group in groups)
    for group, seconds in zip(groups, seconds_of_groups(schedule, lengths, cost), strict=True):
        work[group.ranks[0] : group.ranks[-1] + 1] += seconds
    return float(work.max() / work.mean())


def report(
    title: str,
    schedule: Schedule,
    lengths: np.ndarray,
    cost: CostModel,
    *,
    sync_ranks: int = 1,
    pipeline_size: int = 1,
) -> ScheduleReport:
    """Simulate a schedule and compute its figures."""
    step = simulate(schedule, lengths, cost, sync_ranks=sync_ranks, pipeline_size=pipeline_size)
    groups: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for span in step.spans:
        size = span.group.cp_size
        groups[size] += 1
        tokens[size] += int(lengths[list(span.group.sample_ids)].sum())
    useful, overhead, idle = step.shares(schedule.num_ranks, cost.ideal_seconds(lengths))
    return ScheduleReport(
        title=title,
        step=step,
        seconds=step.seconds,
        imbalance=imbalance_of_work(schedule, lengths, cost),
        useful=useful,
        overhead=overhead,
        idle=idle,
        padding=padding_fraction(schedule, lengths, cost.placement),
        num_microbatches=schedule.num_microbatches,
        idle_slots=sum(len(ranks) for ranks in schedule.idle_slots()),
        cp_sizes={size: (groups[size], tokens[size]) for size in sorted(groups, reverse=True)},
    )


def as_text(dynamic: ScheduleReport, static: Sequence[ScheduleReport], lengths: np.ndarray, num_ranks: int) -> str:
    """Format the summary that ``megatron-cp schedule`` prints."""
    lines = [
        f"{len(lengths)} samples, {int(lengths.sum())} tokens (longest {int(lengths.max())}, "
        f"median {int(np.median(lengths))}) on {num_ranks} ranks",
        "",
        f"{'':30}{'simulated s':>13}{'imbalance':>11}{'useful':>8}{'overhead':>10}{'idle':>7}{'padding':>9}"
        f"{'microbatches':>14}",
    ]
    for one in (*static, dynamic):
        lines.append(
            f"{one.title:30}{one.seconds:13.3f}{one.imbalance:11.3f}{one.useful:8.1%}{one.overhead:10.1%}{one.idle:7.1%}"
            f"{one.padding:9.2%}{one.num_microbatches:14}"
        )
    lines += ["", "CP size   groups        tokens   share of tokens"]
    for size, (groups, tokens) in dynamic.cp_sizes.items():
        share = tokens / int(lengths.sum())
        lines.append(f"{size:7}{groups:9}{tokens:14}{share:10.1%}  {'#' * max(1, round(40 * share))}")
    lines += [""] + [f"{dynamic.title}: {compared(dynamic, one)}" for one in static]
    return "\n".join(lines)


def compared(dynamic: ScheduleReport, static: ScheduleReport) -> str:
    """Describe the simulated speed of one step relative to another."""
    ratio = f"{static.seconds / dynamic.seconds:.2f}x"
    if ratio == "1.00x":
        return f"simulated no faster ({ratio}) than {static.title}"
    return f"simulated {ratio} as fast as {static.title}"
