"""Optimizer steps for the training loop, each with this rank's microbatches.

:class:`StaticSteps` has microbatches of one size and sequence length.
:class:`~megatron_cp.training.packed.steps.PackedSteps` packs and schedules samples of many lengths.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from megatron_cp.common.errors import DataError
from megatron_cp.common.limits import reached_limit, shared_memory_full
from megatron_cp.common.prefetch import Prefetch
from megatron_cp.data.batch_iterator import Batch, BatchIterator, slice_for_context_parallel
from megatron_cp.dynamic_cp.runtime.iterator import StepPlan
from megatron_cp.dynamic_cp.runtime.packing import PackedMicrobatch, checksum_of
from megatron_cp.parallel.transfer import pinned
from megatron_cp.training.batch_checks import BatchChecks, Problem
from megatron_cp.training.setup import Run

Microbatch = Batch | PackedMicrobatch


@dataclass(frozen=True)
class Step:
    """Data of one optimizer step.

    microbatches: of this rank, on its device. num_microbatches: of the whole run (a rank may have fewer).
    lengths: tokens of every sample of the global batch. plan: the packing; ``None`` for a static step.
    """

    microbatches: Sequence[Microbatch]
    num_microbatches: int
    lengths: Sequence[int]
    plan: StepPlan | None = None

    @cached_property
    def tokens(self) -> int:
        """Real tokens of the global batch, including masked ones."""
        return sum(self.lengths)


class Steps(Protocol):
    """Optimizer steps in order. Unusable data raise RuntimeFault on every rank."""

    def __next__(self) -> Step: ...

    def observe(self) -> None:
        """Update the cost model with the time of the last step. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save; valid between steps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after the saved steps."""

    def close(self) -> None: ...


@dataclass
class _Read:
    """Microbatches of a step on the host, with sample checksum and problems."""

    microbatches: list[Batch] = field(default_factory=list)
    checksum: int = 0
    problems: list[Problem] = field(default_factory=list)


class StaticSteps:
    """Steps with a fixed number of microbatches of one size, prefetched by one step.

    A rank has its data-parallel share of the microbatches, each sliced for context parallelism.

    Raises:
        RuntimeFault: on every rank, if the batches of any rank are invalid.
    """

    def __init__(self, run: Run, dataset: Any, consumed_samples: int, training: bool) -> None:
        config, train = run.config, run.config.train
        size, micro = (train.global_batch_size, train.micro_batch_size) if training else config.evaluation_batch
        self._run = run
        self._consumed = consumed_samples
        self._batches = BatchIterator(
            dataset,
            micro_batch_size=micro,
            global_batch_size=size,
            data_parallel_rank=run.groups.dp.rank(),
            data_parallel_size=run.groups.dp.size(),
            consumed_samples=consumed_samples,
            num_workers=config.dataset.num_workers,
        )
        self._checks = BatchChecks(run)
        self._lengths = [config.model.seq_length or 0] * size
        self._prefetch: Prefetch[_Read] = Prefetch(count=steps_to_come(run, training), name="batches")

    def __next__(self) -> Step:
        """Return all microbatches at once.

        Problems can be reported to all ranks only before any rank waits for another in the pipeline.
        """
        read = _Read()
        with self._collecting_errors(read.problems):
            self._batches.start()  # on the main thread, not the prefetch thread
            read = self._prefetch.take(self._read)
        self._checks.check_on_all_ranks(read.checksum, read.problems)
        self._consumed += len(self._lengths)
        self._prefetch.begin(self._read)
        device = self._run.device
        return Step(
            [{key: value.to(device, non_blocking=True) for key, value in batch.items()} for batch in read.microbatches],
            len(read.microbatches),
            self._lengths,
        )

    def _read(self) -> _Read:
        """Read the next step, in the background."""
        cp, read = self._run.groups.cp, _Read()
        with self._collecting_errors(read.problems):
            for _ in range(self._batches.num_microbatches):
                whole = next(self._batches)
                read.checksum = checksum_of(whole, read.checksum)
                own = slice_for_context_parallel(whole, cp.rank(), cp.size())
                read.problems += self._checks.problems_of(own)
                read.microbatches.append({key: pinned(value, self._run.device) for key, value in own.items()})
        return read

    @contextmanager
    def _collecting_errors(self, problems: list[Problem]) -> Iterator[None]:
        """Collect errors of the data, to report to all ranks; raise all other errors."""
        try:
            yield
        except StopIteration:
            problems.append(f"the data ends after {self._batches.consumed_samples} samples")
        except DataError as error:
            problems.append(DataError(_without_traceback(str(error))))
        except OSError as error:
            full = error.errno == errno.ENOSPC  # reading needs no disk space, so /dev/shm is full
            problems.append(shared_memory_full() if full else reached_limit(error) or _without_traceback(str(error)))
        except (ValueError, IndexError) as error:
            problems.append(_without_traceback(str(error)))
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            problems.append(reached_limit(error) or _without_traceback(str(error)))

    def observe(self) -> None:
        """Do nothing: static steps have no cost model."""

    def state_dict(self) -> dict[str, Any]:
        self._prefetch.settle()  # a forked checkpoint writer must not copy a running thread
        return {"consumed_samples": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prefetch.forget()
        self._batches.load_state_dict(state)
        self._consumed = self._batches.consumed_samples

    def close(self) -> None:
        self._prefetch.close()
        self._batches.close()


def _without_traceback(message: str) -> str:
    """Return the error message of a data worker.

    torch puts the worker's whole traceback into the message, with the error in the last line.
    """
    if "Original Traceback" not in message:
        return message
    last = message.rstrip().splitlines()[-1]
    return last.partition(": ")[2] or last


def steps_to_come(run: Run, training: bool) -> int:
    """Return how many steps to prefetch in training or one evaluation."""
    config = run.config
    return config.train.iterations - run.progress.iteration if training else config.validation.eval_iters
