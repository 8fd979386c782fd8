"""The order in which samples become microbatches, and the slicing of a batch for context parallelism.

Global batch i holds samples [i * global_batch_size, (i+1) * global_batch_size) under every parallel layout; the layout
only decides which rank computes which of them.
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
    """Microbatches of one data-parallel rank, in order and without end markers between global batches.

    Each is a dict of ``[micro_batch_size, seq_length]`` tensors. Ends (StopIteration) with the last whole global batch.
    Ranks that share a data-parallel rank (tensor, context and pipeline parallel) get equal microbatches. The sizes
    divide each other, as rules A6 and A7 see to.
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
        self.consumed_samples = consumed_samples  # dealt to all ranks together since the start of training
        self._microbatches: Iterator[Batch] | None = None

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        batch = next(self.start())
        self.consumed_samples += self._stride
        return batch

    def start(self) -> Iterator[Batch]:
        """Start the processes that read, if there are any and they do not run. What ends one is an error in the main
        thread if that is where they were started, and else noticed when something is to be read."""
        if self._microbatches is None:
            loader = DataLoader(
                self._dataset,
                batch_sampler=_microbatches(self.consumed_samples, len(self._dataset), *self._sizes),  # type: ignore[arg-type]
                collate_fn=_stack,
                # Its own generator: by default a loader draws its workers' seeds from the generator of dropout.
                generator=torch.Generator(),
                worker_init_fn=_leave_stopping_to_the_rank,
                num_workers=self._num_workers,
                # Python 3.14 would have each of them import torch and megatron-core anew, without what mcore/ changes.
                multiprocessing_context="fork" if self._num_workers else None,
            )
            self._microbatches = iter(loader)
        return self._microbatches

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on exactly where the saved iterator stopped, also under another layout or micro-batch size."""
        self.consumed_samples = int(state["consumed_samples"])
        self.close()

    def close(self) -> None:
        """End the processes that read."""
        self._microbatches = None


def _microbatches(start: int, stop: int, micro: int, global_batch: int, rank: int, size: int) -> Iterator[list[int]]:
    """Sample indices of a rank's microbatches, from ``start`` to the last whole global batch before ``stop``.

    A function of numbers: one of the iterator's own would keep it, and with it the processes that read.
    """
    for batch in range(start, stop - global_batch + 1, global_batch):
        for first in range(batch + rank * micro, batch + global_batch, micro * size):
            yield list(range(first, first + micro))


def _leave_stopping_to_the_rank(worker: int) -> None:
    """Launchers and terminals send signals to a rank's workers, too: one that ends takes with it the rank that is to
    save. (torch answers SIGINT itself.)"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _stack(samples: Sequence[Batch]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in SAMPLE_KEYS}


class SlicedBatch(dict[str, torch.Tensor]):
    """A batch that holds one context-parallel rank's part of each sequence."""


def slice_for_context_parallel(batch: Batch, cp_rank: int, cp_size: int) -> SlicedBatch:
    """This context-parallel rank's part of a batch, cut along the sequence (dimension 1) in zigzag order.

    ``batch`` holds whole sequences, [micro_batch_size, seq_length] each; the result [micro_batch_size,
    seq_length / cp_size]. Only the keys of a sample are known; a batch is sliced exactly once.

    Raises:
        ValueError: a batch that is sliced already, an unknown key, or a length that is not divisible by 2 * cp_size.
    """
    if isinstance(batch, SlicedBatch):
        raise ValueError("this batch is already sliced for context parallelism; slice each batch once")
    unknown = sorted(set(batch) - set(SAMPLE_KEYS))
    if unknown:
        raise ValueError(f"cannot slice {unknown} for context parallelism: only {list(SAMPLE_KEYS)} are known")
    return SlicedBatch({key: shard_sequence(value, 1, cp_rank, cp_size) for key, value in batch.items()})
