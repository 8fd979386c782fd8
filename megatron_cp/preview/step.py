"""Samples of a step, and the ranks that read them, as the run computes both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.data.batch_iterator import samples_of_microbatches
from megatron_cp.data.samples.contents import Origin
from megatron_cp.data.samples.datasets import Datasets, build_datasets
from megatron_cp.data.samples.split_files import has_test_part
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.dynamic_cp.types import Group, Schedule, padded_tokens
from megatron_cp.parallel.layout import RankLayout, layout_of
from megatron_cp.planner.scheduling import fit_token_buckets, make_schedule, model_cost
from megatron_cp.rules.remedies import Case


@dataclass(frozen=True)
class SeenSample:
    """A sample of a step.

    ids: its first token and then its labels, int64 [tokens + 1]; None if they were not kept. learned: which of ``ids``
    are under the loss, bool; never the first.
    """

    number: int  # in the run's order
    origin: Origin
    tokens: int
    loss_tokens: int
    ids: np.ndarray | None = None
    learned: np.ndarray | None = None


@dataclass(frozen=True)
class SeenStep:
    """A step's samples and their schedule; ``samples[i]`` is sample i of the schedule.

    members: the ranks of each position of the schedule, for all parts of the model.
    placement: as ``model.packed_placement``.
    """

    samples: tuple[SeenSample, ...]
    schedule: Schedule
    members: tuple[tuple[int, ...], ...]
    placement: str

    def ranks(self, group: Group) -> list[int]:
        """Return all ranks that read the group's samples."""
        return sorted(rank for position in group.ranks for rank in self.members[position])

    def padding(self, group: Group) -> int:
        """Return the padding tokens of the group's pack."""
        width = self.schedule.sequence_parallel_size
        tokens = [self.samples[i].tokens for i in group.sample_ids]
        common: dict[str, Any] = {"placement": self.placement, "token_buckets": self.schedule.token_buckets}
        return padded_tokens(tokens, group.cp_size, width, **common) - sum(tokens)


def build_training_data(case: Case, tokenizer: Tokenizer, last_step: int) -> Datasets:
    """Build the data sets of a run of at least ``last_step`` steps, in one process.

    Sizes are the run's own, so that both use the same cached indices.

    Raises:
        DataError: as :func:`build_datasets`.
    """
    config = case.config
    samples = max(config.train.train_iters or 0, last_step) * config.train.global_batch_size
    evaluated = config.evaluation_samples
    return build_datasets(
        config.dataset, tokenizer, samples, evaluated, evaluated if has_test_part(config.dataset) else 0
    )


def read_step(case: Case, dataset: Any, step: int, num_kept: int) -> SeenStep:
    """Read all samples of a step, counted from 1.

    Keeps the tokens of the first ``num_kept`` samples in the schedule's order.

    Raises:
        DataError: a sample cannot be read, or no schedule is possible.
    """
    size = case.config.train.global_batch_size
    layout = layout_of(case.config.model, case.config.dist, case.world_size)
    numbers = range((step - 1) * size, step * size)
    schedule = _schedule(case, layout, dataset, numbers)
    in_order = [i for groups in schedule.microbatches for group in groups for i in group.sample_ids]
    samples = _read(dataset, numbers, set(in_order[:num_kept]))
    domains = layout.groups("dp_cp")  # one for each part of the model, all with the same schedule
    return SeenStep(samples, schedule, tuple(zip(*domains, strict=True)), case.config.model.packed_placement)


def _schedule(case: Case, layout: RankLayout, dataset: Any, numbers: Sequence[int]) -> Schedule:
    """Return the step's schedule.

    Without packing, each microbatch of a data-parallel rank is a group.
    """
    model, micro, size = case.config.model, case.config.train.micro_batch_size, len(numbers)
    if model.sequence_packing_scheduler is not None:
        scheduler = partial(make_schedule, model, layout, cost=model_cost(case))

        def lengths(indices: Sequence[int]) -> list[int]:
            return dataset.lengths(np.array(indices, dtype=np.int64)).tolist()

        try:
            schedule = scheduler(lengths(numbers))
            if not model.packed_shape_buckets:
                return schedule
            fit = fit_token_buckets(case, scheduler, lengths, size, case.config.train.iterations)
            return replace(schedule, token_buckets=fit.tokens)
        except ValueError as error:
            raise DataError(str(error)) from error
    microbatches = zip(
        *(
            [
                Group(tuple(range(rank * layout.cp, (rank + 1) * layout.cp)), tuple(ids))
                for ids in samples_of_microbatches(0, size, micro, size, rank, layout.dp)
            ]
            for rank in range(layout.dp)
        ),
        strict=True,
    )
    most = micro * (model.seq_length or 0) // layout.cp
    return Schedule(layout.dp * layout.cp, most, [list(groups) for groups in microbatches])


def _read(dataset: Any, numbers: Sequence[int], kept: Collection[int]) -> tuple[SeenSample, ...]:
    found = []
    for i, number in enumerate(numbers):
        sample = dataset[number]
        mask = sample["loss_mask"].numpy() > 0
        seen = SeenSample(number, dataset.origin(number), len(mask), int(mask.sum()))
        if i in kept:
            ids = np.append(sample["tokens"][:1].numpy(), sample["labels"].numpy())
            seen = replace(seen, ids=ids, learned=np.append(False, mask))
        found.append(seen)
    return tuple(found)
