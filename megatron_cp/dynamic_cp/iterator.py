"""Global batches of samples made into this rank's packed microbatches, scheduled one step ahead.

Lengths are known before the samples are read, so the schedule of the next step is computed in the background while
the current one runs, by every rank for itself: the scheduler is deterministic. Each rank then reads just the samples
that its own microbatches hold.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_cp.dynamic_cp.domain import DynamicGroups
from megatron_cp.dynamic_cp.packing import PackedMicrobatch, Sample, dummy_sample, pack
from megatron_cp.dynamic_cp.types import Group, Schedule, padded_length

Scheduler = Callable[[Sequence[int]], Schedule]


class SampleSource(Protocol):
    """Variable-length samples whose lengths are known without reading them."""

    def __len__(self) -> int: ...

    def length(self, index: int) -> int:
        """Tokens of a sample."""

    def __getitem__(self, index: int) -> Sample:
        """1-D ``tokens``, ``labels`` (int64) and ``loss_mask`` (float32) of that length."""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of this rank.

    ``groups`` has an entry a microbatch, ``None`` where this rank runs a dummy. Times in seconds.
    """

    samples: tuple[int, ...]  # indices into the source, by sample id of the schedule
    lengths: tuple[int, ...]
    schedule: Schedule
    groups: tuple[Group | None, ...]
    exposed_seconds: float  # spent waiting for the scheduler

    @property
    def num_microbatches(self) -> int:
        return len(self.groups)

    @property
    def cp_sizes(self) -> dict[int, int]:
        """How many groups of each size the whole domain runs."""
        return dict(sorted(Counter(g.cp_size for groups in self.schedule.microbatches for g in groups).items()))

    @property
    def padding_fraction(self) -> float:
        """Padding tokens by real tokens, over the whole domain."""
        width = self.schedule.sequence_parallel_size
        padded = sum(
            padded_length(self.lengths[i], g.cp_size, width)
            for groups in self.schedule.microbatches
            for g in groups
            for i in g.sample_ids
        )
        return padded / sum(self.lengths) - 1


class DynamicBatches:
    """Steps of this rank, in order; ``next`` gives a plan, :meth:`microbatches` its microbatches.

    Args:
        source: the samples; global batch i holds samples [i * size, (i + 1) * size) modulo its length.
        global_batch_size: samples of an optimizer step.
        scheduler: lengths to a schedule over the domain's ranks; the same on every rank.
        groups: this rank's process groups.
        keep_step: ranks must run equally many microbatches (pipeline stages): idle slots become dummies. Otherwise
            a rank that has nothing to do in a microbatch leaves it out, though it runs at least one a step.
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
    ) -> None:
        if len(source) == 0:
            raise ValueError("the data set is empty: no sample can be scheduled")
        if global_batch_size < 1:
            raise ValueError(f"train.global_batch_size={global_batch_size}: must be at least 1")
        self._source = source
        self._size = global_batch_size
        self._scheduler = scheduler
        self._groups = groups
        self._keep_step = keep_step
        self._device = device
        self._consumed = consumed_samples
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cp-scheduler")
        self._ahead: Future[tuple[tuple[int, ...], tuple[int, ...], Schedule]] | None = None

    def __iter__(self) -> Iterator[StepPlan]:
        return self

    def __next__(self) -> StepPlan:
        pending = self._ahead or self._pool.submit(self._schedule, self._consumed)
        start = time.perf_counter()
        samples, lengths, schedule = pending.result()
        exposed = time.perf_counter() - start
        self._consumed += self._size
        self._ahead = self._pool.submit(self._schedule, self._consumed)
        self._groups.prepare(group.ranks for row in schedule.microbatches for group in row)
        groups: list[Group | None] = list(schedule.groups_of(self._groups.position))
        if not self._keep_step:
            groups = [group for group in groups if group is not None] or [None]
        return StepPlan(samples, lengths, schedule, tuple(groups), exposed)

    def _schedule(self, consumed: int) -> tuple[tuple[int, ...], tuple[int, ...], Schedule]:
        samples = tuple(index % len(self._source) for index in range(consumed, consumed + self._size))
        lengths = tuple(self._source.length(index) for index in samples)
        return samples, lengths, self._scheduler(lengths)

    def microbatches(self, plan: StepPlan) -> Iterator[PackedMicrobatch]:
        """Read and pack this rank's microbatches of a step, one at a time."""
        width = plan.schedule.sequence_parallel_size
        for group in plan.groups:
            ranks = (self._groups.position,) if group is None else group.ranks
            samples = (
                [dummy_sample(width)]
                if group is None
                else [self._source[plan.samples[sample_id]] for sample_id in group.sample_ids]
            )
            yield pack(samples, self._groups.get(ranks), sequence_parallel_size=width, device=self._device)

    def state_dict(self) -> dict[str, int]:
        """What to save: valid between steps."""
        return {"consumed_samples": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on exactly where the saved one stopped, also on another number of ranks."""
        self._consumed = int(state["consumed_samples"])
        self._ahead = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
