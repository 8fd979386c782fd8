"""Global batches of samples made into this rank's packed microbatches, one step ahead.

Lengths are known before the samples are read, so the next step is scheduled, read and laid out in the background while
the current one runs, by every rank for itself: the scheduler is deterministic. Each rank reads just the samples that
its own microbatches hold.
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
from megatron_cp.dynamic_cp.analysis.report import as_arrays, cp_sizes, imbalance_of_work, padding_fraction
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
from megatron_cp.dynamic_cp.types import Group, Schedule

Scheduler = Callable[[Sequence[int], CostModel], Schedule]


class SampleSource(Protocol):
    """Variable-length samples whose lengths are known without reading them.

    It has as many as are asked for: an epoch that begins again is the source's, which deals it in another order.
    """

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of samples: int64 [n] of int64 [n]."""

    def __getitem__(self, index: int) -> Sample:
        """1-D ``tokens``, ``labels`` (int64) and ``loss_mask`` (float32) of that length."""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of this rank.

    ``groups`` has an entry a microbatch, ``None`` where this rank runs a dummy; ``packs`` are their contents.
    ``checksums`` are those of the samples that were read, by sample id. Times in seconds.
    What is told of every step takes long where batches are large: it is worked out with the plan, in the background.
    """

    samples: tuple[int, ...]  # indices into the source, by sample id of the schedule
    lengths: tuple[int, ...]
    schedule: Schedule
    cost: CostModel  # what the schedule was made with
    groups: tuple[Group | None, ...]
    packs: tuple[HostPack, ...]
    checksums: Mapping[int, int]
    checksum: int  # of samples, lengths and schedule
    imbalance: float  # seconds of the rank with most work by the cost model, over the mean of all ranks
    padding_fraction: float  # padding tokens by real tokens, over the whole domain
    cp_sizes: Mapping[int, int]  # how many groups of each size the whole domain runs
    exposed_seconds: float = 0.0  # spent waiting for all this

    @property
    def num_microbatches(self) -> int:
        return len(self.groups)


class DynamicBatches:
    """Steps of this rank, in order; ``next`` gives a plan, :meth:`microbatches` its microbatches.

    Args:
        source: the samples; global batch i holds samples [i * size, (i + 1) * size).
        global_batch_size: samples of an optimizer step.
        scheduler: lengths and cost model to a schedule over the domain's ranks; the same on every rank.
        groups: this rank's process groups.
        keep_step: ranks must run equally many microbatches (pipeline stages): idle slots become dummies. Otherwise
            a rank that has nothing to do in a microbatch leaves it out, though it runs at least one a step.
        cost: the model to schedule with; see :meth:`use_cost`.
        longest: most tokens of a sample.
        num_steps: how many will be asked for, if that is known: the last of them starts no further one.
    """

    def __init__(
        self,
        source: SampleSource,
        global_batch_size: int,
        scheduler: Scheduler,
        groups: DynamicGroups,
        *,
        keep_step: bool,
        device: torch.device | str = "cpu",
        consumed_samples: int = 0,
        cost: CostModel = DEFAULT_COST,
        longest: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        self._source = source
        self._size = global_batch_size
        self._scheduler = scheduler
        self._groups = groups
        self._keep_step = keep_step
        self._device = device
        self._longest = longest
        self._consumed = consumed_samples
        # The next step may be under way with an older cost model than the one in use now.
        self._cost_of_next = self._cost = cost
        self._ahead: Prefetch[StepPlan] = Prefetch(count=num_steps, name="cp-scheduler")

    def __iter__(self) -> Iterator[StepPlan]:
        return self

    def __next__(self) -> StepPlan:
        """The next step. Raises what went wrong with it: ValueError, or what the source raises."""
        begin = perf_counter()
        plan = self._ahead.take(self._plan, self._consumed, self._cost_of_next)
        exposed = perf_counter() - begin
        self._consumed += self._size
        self._cost_of_next = self._cost
        self._ahead.begin(self._plan, self._consumed, self._cost_of_next)
        return replace(plan, exposed_seconds=exposed)

    def _plan(self, consumed: int, cost: CostModel) -> StepPlan:
        samples = tuple(range(consumed, consumed + self._size))
        lengths = self._lengths(samples)
        schedule = self._scheduler(lengths, cost)
        groups: list[Group | None] = list(schedule.groups_of(self._groups.position))
        if not self._keep_step:
            groups = [group for group in groups if group is not None] or [None]
        checksums: dict[int, int] = {}
        packs = tuple(
            self._read(group, samples, lengths, schedule.sequence_parallel_size, checksums).pinned(self._device)
            for group in groups
        )
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
            padding_fraction=padding_fraction(schedule, lengths),
            cp_sizes=cp_sizes(schedule),
        )

    def _lengths(self, samples: Sequence[int]) -> tuple[int, ...]:
        lengths = self._source.lengths(np.array(samples, dtype=np.int64))
        longest = math.inf if self._longest is None else self._longest
        for place in np.flatnonzero((lengths < 1) | (lengths > longest))[:1]:
            index, length = samples[place], lengths[place]
            if length < 1:
                raise ValueError(f"sample {index} of the data set is empty; leave empty documents out")
            raise ValueError(
                f"sample {index} of the data set has {length} tokens, more than {NAME.dataset.seq_length}={longest}; "
                f"raise that, or have long documents cut ({NAME.dataset.too_long}=split)"
            )
        return tuple(lengths.tolist())

    def _read(
        self,
        group: Group | None,
        samples: Sequence[int],
        lengths: Sequence[int],
        width: int,
        checksums: dict[int, int],
    ) -> HostPack:
        if group is None:
            return lay_out([dummy_sample(width)], 0, 1, sequence_parallel_size=width, idle=True)
        parts = []
        for sample_id in group.sample_ids:
            index = samples[sample_id]
            part = self._source[index]
            _check(index, part, lengths[sample_id])
            checksums[sample_id] = checksum_of({key: part[key] for key in TRAINED})
            parts.append(part)
        rank = group.ranks.index(self._groups.position)
        return lay_out(parts, rank, group.cp_size, sequence_parallel_size=width)

    def microbatches(self, plan: StepPlan) -> list[PackedMicrobatch]:
        """This rank's microbatches of a step, on its device. Collective: creates the groups that are missing."""
        self._groups.prepare(group.ranks for row in plan.schedule.microbatches for group in row)
        ranks = [(self._groups.position,) if group is None else group.ranks for group in plan.groups]
        return [
            pack.on(self._device, self._groups.of_block(block)) for pack, block in zip(plan.packs, ranks, strict=True)
        ]

    def use_cost(self, cost: CostModel) -> None:
        """Schedule with ``cost`` from the first step on that is not under way yet; the same call on every rank."""
        self._cost = cost

    def state_dict(self) -> dict[str, Any]:
        """What to save: valid between steps. A process that is forked to write it finds no thread at work."""
        self._ahead.settle()
        costs = {"cost_of_next": asdict(self._cost_of_next), "cost": asdict(self._cost)}
        return {"consumed_samples": self._consumed, **costs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the saved one stopped, also on another number of ranks.

        The cost models are taken over if they are given: with them the schedules are the same, too.
        """
        self._consumed = int(state["consumed_samples"])
        if "cost" in state:
            self._cost_of_next, self._cost = CostModel(**state["cost_of_next"]), CostModel(**state["cost"])
        self._ahead.forget()

    def close(self) -> None:
        self._ahead.close()


def _check(index: int, sample: Sample, length: int) -> None:
    """Raise ValueError for a sample that is not what its length says, or that is not trained as its mask says."""
    for key in TRAINED:
        if len(sample[key]) != length:
            raise ValueError(
                f"sample {index} of the data set should have {length} {key}, but has {len(sample[key])}: each token "
                "needs one label and one place in the loss mask"
            )
    for problem in mask_problems(sample["loss_mask"]):
        raise ValueError(f"sample {index} of the data set: {problem}")


def _checksum_of_plan(samples: Sequence[int], lengths: Sequence[int], schedule: Schedule) -> int:
    crc = schedule.num_microbatches  # the last ones may be empty
    for numbers in (np.array([samples, lengths], dtype=np.int64), *as_arrays(schedule)):
        crc = zlib.crc32(numbers, crc)
    return crc
