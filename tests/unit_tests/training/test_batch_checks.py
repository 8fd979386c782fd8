"""Batches that do not match the layout end the run on every rank.

There is one message and no hang.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_cp.common.errors import DataError
from megatron_cp.data import batch_iterator
from megatron_cp.data.samples.datasets import MockDataset
from megatron_cp.dynamic_cp.runtime.packing import checksum_of
from megatron_cp.training import batches as training_batches


def on_rank_one(change: Callable[[], None]) -> None:
    if os.environ["RANK"] == "1":
        change()


def change_samples(how: Callable[[int, dict], dict]) -> None:
    original = MockDataset.__getitem__
    MockDataset.__getitem__ = lambda self, index: how(index, original(self, index))  # type: ignore[method-assign]


def other_samples() -> None:
    """Change the samples as if this node had another sample index."""
    change_samples(lambda index, sample: sample | {"tokens": sample["tokens"].roll(1)})


def unreadable_sample() -> None:
    def fail(index: int, sample: dict) -> dict:
        raise DataError("corpus.bin: holds token 300, but the tokenizer's ids are 0 to 254.")

    change_samples(fail)


def restarted_positions() -> None:
    change_samples(lambda index, sample: sample | {"position_ids": sample["position_ids"] % 8})


def another_key() -> None:
    batch_iterator.SAMPLE_KEYS = (*batch_iterator.SAMPLE_KEYS, "scores")  # type: ignore[misc]
    change_samples(lambda index, sample: sample | {"scores": sample["loss_mask"]})


def shorter_samples() -> None:
    change_samples(lambda index, sample: {key: value[:16] for key, value in sample.items()})


def sliced_twice() -> None:
    original = training_batches.slice_for_context_parallel
    training_batches.slice_for_context_parallel = lambda batch, rank, size: original(
        original(batch, rank, size), rank, size
    )


def weighed_tokens() -> None:
    change_samples(lambda index, sample: sample | {"loss_mask": sample["loss_mask"] / 2})


def no_more_data() -> None:
    MockDataset.__len__ = lambda self: 1  # type: ignore[method-assign]


FAULTS: dict[Callable[[], None], str] = {
    other_samples: "data-parallel replica 0: ranks [1] and rank 0 read different samples",
    unreadable_sample: "rank 1: corpus.bin: holds token 300",
    restarted_positions: "rank 1: error B10: position_ids: context-parallel rank 1 of 2 has positions",
    another_key: "rank 1: error B7: scores: unknown key 'scores'",
    shorter_samples: "rank 1: error B9: tokens: holds 8 tokens, not 32 / cp 2 = 16: already sliced?",
    sliced_twice: "rank 1: batch: is already sliced for context parallelism. Fix: slice each batch once",
    weighed_tokens: "rank 1: the loss mask has values other than 0 and 1",
    no_more_data: "rank 1: the data ends after 0 samples",
}
# Errors that a data worker finds itself; the training process finds all others.
OF_WORKERS = (unreadable_sample, no_more_data)


@pytest.mark.parametrize(
    ("change", "message", "workers"),
    [
        pytest.param(*fault, workers, marks=[pytest.mark.slow] if workers and fault[0] not in OF_WORKERS else [])
        for fault in FAULTS.items()
        for workers in (0, 1)
    ],
)
def test_one_ranks_fault_ends_all_ranks(cli: Any, change: Callable[[], None], message: str, workers: int) -> None:
    code, text = cli(f"dataset.num_workers={workers}", before=lambda: on_rank_one(change))
    of_data = change is unreadable_sample  # which no other start would find otherwise
    expected = 2 if of_data else 1
    assert code == expected and text.count("the batches of step 1 cannot be used.") == 1 and message in text, text


def dying_worker() -> None:
    def die(index: int, sample: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    change_samples(die)


def test_a_dead_data_worker_is_reported_by_all_ranks(cli: Any) -> None:
    code, text = cli("dataset.num_workers=1", before=lambda: on_rank_one(dying_worker))
    assert code == 1 and "rank 1: DataLoader worker (pid" in text, text


def test_no_stage_of_a_pipeline_waits_for_the_others_activations(cli: Any) -> None:
    layout = ["model.pipeline_model_parallel_size=2", "model.num_layers=2"]
    code, text = cli(*layout, ranks=4, before=lambda: on_rank_one(other_samples))
    assert code == 1 and "ranks [1] and rank 0 read different samples, but ranks [0, 1, 2, 3]" in text, text


def test_the_checksum_sees_every_tensor_and_the_order() -> None:
    batch = {"tokens": torch.arange(8).view(1, 8), "loss_mask": torch.ones(1, 8)}
    masked = batch | {"loss_mask": torch.tensor([[1.0] * 7 + [0.0]])}
    swapped = batch | {"tokens": batch["tokens"].flip(1)}
    assert len({checksum_of(b) for b in (batch, masked, swapped)} | {checksum_of(batch, 1)}) == 4
    assert checksum_of(dict(reversed(batch.items()))) == checksum_of(batch)
