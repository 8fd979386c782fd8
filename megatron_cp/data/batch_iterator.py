"""Iterator over microbatches, and slicing of batches for context parallelism.

Global batch i holds samples [i * global_batch_size, (i+1) * global_batch_size) under every parallel layout. The layout
only decides which rank computes which samples.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_cp.attention.sharding import shard_sequence
from megatron_cp.data.samples.datasets import SAMPLE_KEYS

Batch = dict[str, torch.Tensor]


class BatchIterator:
    """Microbatches of one data-parallel rank, in order.

    A microbatch is a dict of ``[micro_batch_size, seq_length]`` tensors. Iteration stops after the last whole global
    batch. Ranks with the same data-parallel rank (tensor, context and pipeline parallel) get equal microbatches. Rules
    A6 and A7 ensure that the sizes divide each other.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
    ) -> None:
        stride = micro_batch_size * data_parallel_size
        self.num_microbatches = global_batch_size // stride
        self._dataset, self._stride = dataset, stride
        self._sizes = (micro_batch_size, global_batch_size, data_parallel_rank, data_parallel_size)
        self._num_workers = num_workers
        self.consumed_samples = consumed_samples  # by all ranks, since the start of training
        self._microbatches: Iterator[Batch] | None = None

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        batch = next(self.start())
        self.consumed_samples += self._stride
        return batch

    def start(self) -> Iterator[Batch]:
        """Start the worker processes if they are not running yet.

        If the main thread starts them, the exit of a worker raises an error there at once; otherwise at the next read.
        """
        if self._microbatches is None:
            size = len(self._dataset)  # type: ignore[arg-type]
            loader = DataLoader(
                self._dataset,
                batch_sampler=samples_of_microbatches(self.consumed_samples, size, *self._sizes),
                collate_fn=_stack,
                # By default a loader draws worker seeds from the generator that dropout uses.
                generator=torch.Generator(),
                worker_init_fn=_ignore_stop_signals,
                num_workers=self._num_workers,
                # Python 3.14's default would import megatron-core again in each worker, without the patches of mcore/.
                multiprocessing_context="fork" if self._num_workers else None,
            )
            self._microbatches = iter(loader)
        return self._microbatches

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the saved iterator; layout and micro-batch size may differ."""
        self.consumed_samples = int(state["consumed_samples"])
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._microbatches = None


def samples_of_microbatches(
    start: int, stop: int, micro: int, global_batch: int, rank: int, size: int
) -> Iterator[list[int]]:
    """Yield the sample indices of each microbatch of one rank.

    They run from ``start`` to the last whole global batch before ``stop``. This is no method: a method would keep a
    reference to the iterator, and thereby to the worker processes.
    """
    for batch in range(start, stop - global_batch + 1, global_batch):
        for first in range(batch + rank * micro, batch + global_batch, micro * size):
            yield list(range(first, first + micro))


def _ignore_stop_signals(worker: int) -> None:
    """Ignore SIGTERM and SIGHUP in a worker process; torch handles SIGINT.

    Launchers and terminals send signals to workers too, and a worker that exits would end its rank before it saves.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _stack(samples: Sequence[Batch]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in SAMPLE_KEYS}


class SlicedBatch(dict[str, torch.Tensor]):
    """Batch with one context-parallel rank's part of each sequence."""


def slice_for_context_parallel(batch: Batch, cp_rank: int, cp_size: int) -> SlicedBatch:
    """Slice a batch along the sequence (dimension 1) in zigzag order.

    Tensors of ``batch`` are [micro_batch_size, seq_length], tensors of the result [micro_batch_size,
    seq_length / cp_size].

    Raises:
        ValueError: ``batch`` is already sliced, has an unknown key, or a length not divisible by 2 * cp_size.
    """
    if isinstance(batch, SlicedBatch):
        raise ValueError("batch: is already sliced for context parallelism. Fix: slice each batch once")
    unknown = sorted(set(batch) - set(SAMPLE_KEYS))
    if unknown:
        raise ValueError(f"batch: cannot slice {unknown} for context parallelism. Fix: keep only {list(SAMPLE_KEYS)}")
    return SlicedBatch({key: shard_sequence(value, 1, cp_rank, cp_size) for key, value in batch.items()})
