"""Steps of samples of one length, prefetched by one step.

The samples are the same and in the same order, and none is unused.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cp.common.errors import DataError
from megatron_cp.data.samples.datasets import SAMPLE_KEYS
from megatron_cp.training import batches
from megatron_cp.training.batch_checks import Problem
from megatron_cp.training.batches import StaticSteps
from tests.ranks import run_ranks

BATCH = 4


class Numbered(torch.utils.data.Dataset):
    """Sample i is full of i; notes which are read, slowly and up to a damaged one."""

    def __init__(self, length: int = 100, seconds: float = 0.0, damaged: int = -1, error: Any = DataError) -> None:
        self._length, self._seconds, self._damaged, self._error = length, seconds, damaged, error
        self.read: list[int] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self._seconds)
        if index == self._damaged:
            raise self._error("it is damaged")
        self.read.append(index)
        return {key: torch.full((8,), index) for key in SAMPLE_KEYS}


class Agreeing:
    """Replace the checks among ranks, and record this rank's reports.

    The reports are about its batches.
    """

    def __init__(self, run: Any) -> None:
        self.threads: set[threading.Thread] = set()
        self.reports: list[list[str]] = []

    def problems_of(self, sliced: Any) -> list[str]:
        return []

    def check_on_all_ranks(self, checksum: int, problems: list[Problem]) -> None:
        self.threads.add(threading.current_thread())
        self.reports.append(list(map(str, problems)))
        if problems:
            raise DataError(self.reports[-1][0])


def open_static(dataset: Any, *, iteration: int = 0, training: bool = True, workers: int = 0) -> StaticSteps:
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    train = SimpleNamespace(global_batch_size=BATCH, micro_batch_size=2, iterations=6)
    config = SimpleNamespace(
        train=train,
        evaluation_batch=(BATCH, 2),
        validation=SimpleNamespace(eval_iters=3),
        dataset=SimpleNamespace(num_workers=workers),
        model=SimpleNamespace(seq_length=8),
    )
    run: Any = SimpleNamespace(
        config=config,
        groups=SimpleNamespace(dp=alone, cp=alone),
        device=torch.device("cpu"),
        progress=SimpleNamespace(iteration=iteration),
    )
    return StaticSteps(run, dataset, BATCH * iteration, training)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BatchChecks", Agreeing)


def numbers(steps: Any, count: int) -> list[list[int]]:
    return [[int(n) for batch in next(steps).microbatches for n in batch["tokens"][:, 0]] for _ in range(count)]


def expected(first: int, count: int) -> list[list[int]]:
    return [list(range(BATCH * i, BATCH * (i + 1))) for i in range(first, first + count)]


def test_slow_data_do_not_lengthen_steps() -> None:
    of_data, of_step, count = BATCH * 0.03, 0.15, 5

    def trained() -> float:
        with closing(open_static(Numbered(seconds=0.03))) as steps:
            begun = time.perf_counter()
            for _ in range(count):
                next(steps)
                time.sleep(of_step)
            return time.perf_counter() - begun

    # Only the first step's are waited for. One after the other it would be count * (of_data + of_step).
    assert min(trained() for _ in range(2)) < of_data + count * of_step + 0.6 * (count - 1) * of_data


def walk_and_close(workers: int) -> None:
    with closing(open_static(Numbered(), workers=workers)) as steps:
        assert numbers(steps, 6) == expected(0, 6)
        assert len(multiprocessing.active_children()) == workers
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    assert not multiprocessing.active_children()
    assert steps._checks.threads == {threading.current_thread()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_communicate_in_the_main_thread_and_threads_end(workers: int) -> None:
    run_ranks(walk_and_close, 1, workers)


def walk_and_let_go() -> None:
    steps = open_static(Numbered(), workers=1)
    numbers(steps, 2)
    steps.state_dict()
    gone = weakref.ref(steps)
    del steps
    deadline = time.monotonic() + 60
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread has reported that it is done, and drops its references
    assert gone() is None and not multiprocessing.active_children()


def test_unclosed_steps_end_with_their_owner() -> None:
    """Otherwise this process would wait for its workers for ever at its exit."""
    run_ranks(walk_and_let_go, 1)


@pytest.mark.parametrize(("iteration", "training", "last"), [(0, True, 6), (4, True, 6), (0, False, 3)])
def test_only_trained_batches_are_read(iteration: int, training: bool, last: int) -> None:
    dataset = Numbered()
    with closing(open_static(dataset, iteration=iteration, training=training)) as steps:
        assert numbers(steps, last - iteration) == expected(iteration, last - iteration)
    assert dataset.read == list(range(BATCH * iteration, BATCH * last))


def test_the_state_is_of_the_steps_that_were_taken_and_found_with_no_thread_at_work() -> None:
    dataset = Numbered(seconds=0.02)
    with closing(open_static(dataset)) as steps, closing(open_static(Numbered())) as resumed:
        next(steps)
        state = steps.state_dict()
        assert state == {"consumed_samples": BATCH} and dataset.read == list(range(2 * BATCH))
        numbers(resumed, 3)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert numbers(resumed, 3) == numbers(steps, 3) == expected(1, 3)


@pytest.mark.parametrize(
    ("dataset", "good", "message"),
    [
        (Numbered(damaged=2 * BATCH + 1), 2, "it is damaged"),
        (Numbered(damaged=1, error=OSError), 0, "it is damaged"),
        (Numbered(length=2 * BATCH + 1), 2, "the data ends after 8 samples"),
    ],
)
def test_an_error_of_a_step_is_raised_at_that_step(dataset: Any, good: int, message: str) -> None:
    with closing(open_static(dataset)) as steps:
        assert numbers(steps, good) == expected(0, good)
        with pytest.raises(DataError, match=message):
            next(steps)
        assert steps._checks.reports == [[]] * good + [[message]]  # type: ignore[attr-defined]


def test_bugs_are_raised_unchanged() -> None:
    with closing(open_static(Numbered(damaged=BATCH, error=KeyError))) as steps:
        next(steps)
        with pytest.raises(KeyError, match="it is damaged"):
            next(steps)
        assert steps._checks.reports == [[]]  # type: ignore[attr-defined]


@pytest.fixture
def slow() -> Iterator[Numbered]:
    yield Numbered(seconds=0.2)


def test_closing_waits_for_the_current_read(slow: Numbered) -> None:
    steps = open_static(slow)
    next(steps)
    steps.close()
    read = list(slow.read)
    time.sleep(0.5)
    assert slow.read == read
