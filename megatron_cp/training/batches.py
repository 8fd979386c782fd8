"""What the loop walks: optimizer steps, each with this rank's microbatches and the facts about them.

Two kinds: :class:`StaticSteps`, samples of one length in microbatches of one size, and
:class:`~megatron_cp.training.packed.PackedSteps`, samples of many lengths, packed and scheduled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_cp.data.batches import BatchIterator, slice_for_context_parallel
from megatron_cp.dynamic_cp.iterator import StepPlan
from megatron_cp.dynamic_cp.packing import PackedMicrobatch
from megatron_cp.errors import DataError
from megatron_cp.training.batch_checks import BatchChecks, checksum_of
from megatron_cp.training.setup import Run

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One optimizer step's data.

    microbatches: this rank's, on its device. num_microbatches: of the whole run (a rank may have fewer).
    lengths: tokens of every sample of the global batch. plan: how they were packed, ``None`` for a static step.
    """

    microbatches: Sequence[Batch | PackedMicrobatch]
    num_microbatches: int
    lengths: Sequence[int]
    plan: StepPlan | None = None

    @property
    def tokens(self) -> int:
        """Real tokens of the global batch, masked ones too."""
        return sum(self.lengths)


class Steps(Protocol):
    """Optimizer steps in order, all ranks at once; what cannot be used ends the run on every rank (RuntimeFault)."""

    def __next__(self) -> Step: ...

    def observe(self) -> None:
        """The last step was trained: learn from the time that it took. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """What to save: valid between steps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the saved ones stopped."""

    def close(self) -> None: ...


class RankBatches:
    """This rank's part of each microbatch: its data-parallel share, its context-parallel slice, on its device.

    The first microbatch of a global batch is asked for by all ranks at once: there the whole global batch is fetched
    and checked.

    Raises:
        RuntimeFault: on every rank, where the batches of any rank cannot be used.
    """

    def __init__(self, run: Run, batches: BatchIterator) -> None:
        self._run = run
        self._batches = batches
        self._checks = BatchChecks(run)
        self._window: deque[Batch] = deque()

    def state_dict(self) -> dict[str, int]:
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._batches.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._window:
            self._window.extend(self._next_global_batch())
        batch = self._window.popleft()
        return {key: value.to(self._run.device, non_blocking=True) for key, value in batch.items()}

    def _next_global_batch(self) -> list[Batch]:
        cp, checksum = self._run.groups.cp, 0
        window: list[Batch] = []
        problems: list[str] = []
        try:
            for _ in range(self._batches.num_microbatches):
                whole = next(self._batches)
                checksum = checksum_of(whole, checksum)
                window.append(slice_for_context_parallel(whole, cp.rank(), cp.size()))
                problems += self._checks.problems_of(window[-1])
        except StopIteration:
            problems.append(f"the data ends after {self._batches.consumed_samples} samples")
        except (DataError, ValueError, IndexError, OSError) as error:
            problems.append(_without_traceback(str(error)))
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            problems.append(_without_traceback(str(error)))
        self._checks.agree(checksum, problems)
        return window


def _without_traceback(message: str) -> str:
    """What a data worker said: torch puts its whole traceback into the message, the error itself last."""
    if "Original Traceback" not in message:
        return message
    last = message.rstrip().splitlines()[-1]
    return last.partition(": ")[2] or last


class StaticSteps:
    """Steps of a fixed number of microbatches of fixed size."""

    def __init__(self, run: Run, dataset: Any, consumed_samples: int, training: bool) -> None:
        self._batches = batch_iterator(run, dataset, consumed_samples, training)
        self._of_this_rank = RankBatches(run, self._batches)
        size = run.config.train.global_batch_size
        if not training:
            size = run.config.validation.eval_global_batch_size or size
        self._lengths = [run.config.model.seq_length or 0] * size

    def __next__(self) -> Step:
        count = self._batches.num_microbatches
        return Step([next(self._of_this_rank) for _ in range(count)], count, self._lengths)

    def observe(self) -> None:
        """Nothing depends on it."""

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)

    def close(self) -> None:
        """Nothing to end."""


def batch_iterator(run: Run, dataset: Any, consumed_samples: int, training: bool) -> BatchIterator:
    """Microbatches of this rank from a dataset, starting after ``consumed_samples``."""
    config = run.config
    train, held_out = config.train, config.validation
    return BatchIterator(
        dataset,
        micro_batch_size=train.micro_batch_size
        if training
        else held_out.eval_micro_batch_size or train.micro_batch_size,
        global_batch_size=(
            train.global_batch_size if training else held_out.eval_global_batch_size or train.global_batch_size
        ),
        data_parallel_rank=run.groups.dp.rank(),
        data_parallel_size=run.groups.dp.size(),
        consumed_samples=consumed_samples,
        num_workers=config.dataset.num_workers,
        pin_memory=run.device.type == "cuda",
    )


def open_steps(run: Run, dataset: Any, consumed_samples: int, training: bool) -> Steps:
    """The steps of a configuration over a dataset, starting after ``consumed_samples``."""
    packed = run.config.model.sequence_packing_scheduler is not None
    in_other_groups = not training and run.config.dist.eval_context_parallel_size is not None
    if not packed and not in_other_groups:
        return StaticSteps(run, dataset, consumed_samples, training)
    from megatron_cp.training.packed import OneLength, PackedSteps

    source = dataset if packed else OneLength(dataset, run.config.dataset.seq_length)
    return PackedSteps(run, source, consumed_samples, training)
