"""Packed microbatches of this rank from global batches, prefetched one step ahead.

Lengths are known before samples are read, so the next step is scheduled, read and packed in the background during the
current one. Every rank does so itself, as the scheduler is deterministic. Each rank reads only the samples of its own
microbatches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from megatron_cp.common.prefetch import Prefetch
from megatron_cp.config.names import NAME
from megatron_cp.dynamic_cp.analysis.report import cp_sizes, imbalance_of_work, padding_fraction
from megatron_cp.dynamic_cp.cost import DEFAULT_COST, CostModel
from megatron_cp.dynamic_cp.runtime.domain import DynamicGroups
from megatron_cp.dynamic_cp.runtime.packing import (
    TRAINED,
    HostPack,
    PackedMicrobatch,
    Sample,
    checksum_of,
    dummy_sample,
    lay_out,
    mask_problems,
)
from megatron_cp.dynamic_cp.types import Group, Schedule, as_arrays

Scheduler = Callable[[Sequence[int], CostModel], Schedule]


class SampleSource(Protocol):
    """Variable-length samples whose lengths are known without reading them.

    The source never ends: it starts further epochs itself, in another order.
    """

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of samples: int64 [n] of int64 [n]."""

    def __getitem__(self, index: int) -> Sample:
        """Return 1-D ``tokens``, ``labels`` (int64) and ``loss_mask`` (float32)."""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of this rank. Times in seconds.

    ``groups`` has an entry a microbatch, ``None`` for a dummy; ``packs`` are their contents. ``checksums`` are those of
    the samples read, by sample id. Figures for the log are computed with the plan, in the background.
    """

    samples: tuple[int, ...]  # indices into the source, by sample id of the schedule
    lengths: tuple[int, ...]
    schedule: Schedule
    cost: CostModel  # used for the schedule
    groups: tuple[Group | None, ...]
    packs: tuple[HostPack, ...]
    checksums: Mapping[int, int]
    checksum: int  # of samples, lengths and schedule
    imbalance: float  # work of the most loaded rank over the mean, by the cost model
    padding_fraction: float  # padding tokens per real token, over the domain
    cp_sizes: Mapping[int, int]  # number of groups of each size in the domain
    exposed_seconds: float = 0.0  # time spent waiting for the plan

    @property
    def num_microbatches(self) -> int:
        return len(self.groups)


class DynamicBatches:
    """Steps of this rank, in order; an iterator over :class:`StepPlan`.

    :meth:`microbatches` converts a plan to microbatches.

    Args:
        source: the samples; global batch i holds samples [i * size, (i + 1) * size).
        global_batch_size: samples of an optimizer step.
        scheduler: function from lengths and cost model to a schedule of the domain; equal on every rank.
        groups: this rank's process groups.
        lockstep: ranks must run equally many microbatches (pipeline stages), with dummies in idle slots. Otherwise a
            rank skips microbatches without work, but runs at least one a step.
        placement: of the samples of a pack, as ``model.packed_placement``.
        cost: cost model of the schedules; see :meth:`use_cost`.
        longest: largest number of tokens of a sample.
        num_steps: number of steps, if known: no further step is prefetched.
    """

    def __init__(
        self,
        source: SampleSource,
        global_batch_size: int,
        scheduler: Scheduler,
        groups: DynamicGroups,
        *,
        lockstep: bool,
        device: torch.device | str = "cpu",
        consumed_samples: int = 0,
        placement: str = "zigzag",
        cost: CostModel = DEFAULT_COST,
        longest: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        self._source = source
        self._size = global_batch_size
        self._scheduler = scheduler
        self._groups = groups
        self._lockstep = lockstep
        self._device = device
        self._longest = longest
        self._placement = placement
        self._consumed = consumed_samples
        # The next step may already be planned with the previous cost model.
        self._cost_of_next = self._cost = cost
        self._ahead: Prefetch[StepPlan] = Prefetch(count=num_steps, name="cp-scheduler")

    def __iter__(self) -> Iterator[StepPlan]:
        return self

    def __next__(self) -> StepPlan:
        """Return the next step; raises ValueError, or the source's errors."""
        begin = perf_counter()
        plan = self._ahead.take(self._plan, self._consumed, self._cost_of_next)
        exposed = perf_counter() - begin
        self._consumed += self._size
        self._cost_of_next = self._cost
        self._ahead.begin(self._plan, self._consumed, self._cost_of_next)
        return replace(plan, exposed_seconds=exposed)

    def _plan(self, consumed: int, cost: CostModel) -> StepPlan:
        samples = tuple(range(consumed, consumed + self._size))
        lengths = self.lengths(samples)
        schedule = self._scheduler(lengths, cost)
        groups: list[Group | None] = list(schedule.groups_of(self._groups.position))
        if not self._lockstep:
            groups = [group for group in groups if group is not None] or [None]
        checksums: dict[int, int] = {}
        packs = tuple(self._read(group, samples, lengths, schedule, checksums).pinned(self._device) for group in groups)
        return StepPlan(
            samples,
            lengths,
            schedule,
            cost,
            tuple(groups),
            packs,
            checksums,
            checksum=_checksum_of_plan(samples, lengths, schedule),
            imbalance=imbalance_of_work(schedule, lengths, cost),
            padding_fraction=padding_fraction(schedule, lengths, self._placement),
            cp_sizes=cp_sizes(schedule),
        )

    def lengths(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of samples; raises ValueError for invalid ones."""
        lengths = self._source.lengths(np.array(samples, dtype=np.int64))
        longest = math.inf if self._longest is None else self._longest
        for place in np.flatnonzero((lengths < 1) | (lengths > longest))[:1]:
            index, length = samples[place], lengths[place]
            if length < 1:
                raise ValueError(f"sample {index} of the data set is empty. Fix: leave empty documents out")
            raise ValueError(
                f"sample {index} of the data set has {length} tokens, more than {NAME.dataset.seq_length}={longest}. "
                f"Fix: raise it, or split long documents with {NAME.dataset.too_long}=split"
            )
        return tuple(lengths.tolist())

    def _read(
        self,
        group: Group | None,
        samples: Sequence[int],
        lengths: Sequence[int],
        schedule: Schedule,
        checksums: dict[int, int],
    ) -> HostPack:
        width = schedule.sequence_parallel_size
        padding: dict[str, Any] = {"sequence_parallel_size": width, "token_buckets": schedule.token_buckets}
        if group is None:
            return lay_out([dummy_sample(width)], 0, 1, idle=True, **padding)
        parts = []
        for sample_id in group.sample_ids:
            index = samples[sample_id]
            part = self._source[index]
            _check(index, part, lengths[sample_id])
            checksums[sample_id] = checksum_of({key: part[key] for key in TRAINED})
            parts.append(part)
        rank = group.ranks.index(self._groups.position)
        return lay_out(parts, rank, group.cp_size, placement=self._placement, **padding)

    def microbatches(self, plan: StepPlan) -> list[PackedMicrobatch]:
        """Return a step's microbatches on the device. Collective: creates missing groups."""
        self._groups.prepare(group.ranks for row in plan.schedule.microbatches for group in row)
        ranks = [(self._groups.position,) if group is None else group.ranks for group in plan.groups]
        return [
            pack.on(self._device, self._groups.of_block(block)) for pack, block in zip(plan.packs, ranks, strict=True)
        ]

    def use_cost(self, cost: CostModel) -> None:
        """Use ``cost`` from the first step not planned yet; collective."""
        self._cost = cost

    def state_dict(self) -> dict[str, Any]:
        """Return the state between steps; no thread runs, so the process may fork."""
        self._ahead.settle()
        costs = {"cost_of_next": asdict(self._cost_of_next), "cost": asdict(self._cost)}
        return {"consumed_samples": self._consumed, **costs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved run stopped, also on another number of ranks.

        With the cost models, if they are in ``state``, schedules are the same too.
        """
        self._consumed = int(state["consumed_samples"])
        if "cost" in state:
            self._cost_of_next, self._cost = CostModel(**state["cost_of_next"]), CostModel(**state["cost"])
        self._ahead.forget()

    def close(self) -> None:
        self._ahead.close()


def _check(index: int, sample: Sample, length: int) -> None:
    """Raise ValueError for a sample with another length, or with an invalid mask."""
    for key in TRAINED:
        if len(sample[key]) != length:
            raise ValueError(
                f"sample {index} of the data set has {len(sample[key])} {key}, but {length} are required: one label "
                "and one loss mask entry a token"
            )
    for problem in mask_problems(sample["loss_mask"]):
        raise ValueError(f"sample {index} of the data set: {problem}")


def _checksum_of_plan(samples: Sequence[int], lengths: Sequence[int], schedule: Schedule) -> int:
    crc = schedule.num_microbatches  # the last microbatches may be empty
    inputs = np.array([samples, lengths], dtype=np.int64), np.array(schedule.token_buckets, dtype=np.int64)
    for numbers in (*inputs, *as_arrays(schedule)):
        crc = zlib.crc32(numbers, crc)
    return crc
