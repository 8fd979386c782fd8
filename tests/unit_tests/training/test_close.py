"""A closed run leaves neither its model nor threads in the process.

The threads are those of its process groups.
"""

import gc
import os
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import train_step
from tests.packed_runs import DYNAMIC, lengths_file, packed_config, train_dataset
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, TP2

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")

LAYOUTS: dict[str, dict[str, Any]] = {
    "mpu": CP2 | TP2,
    "mpu a2a+p2p": CP4 | HCP,
    "decentralized a2a+p2p": CP4 | HCP | {"dist__use_decentralized_pg": True},
    "overlapped": CP2 | {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True},
}
PACKED = DYNAMIC | {"model__max_seqlen_per_dp_cp_rank": 32}
PACKED_LAYOUTS: dict[str, dict[str, Any]] = {
    "dynamic": PACKED,
    "decentralized dynamic": PACKED | {"dist__use_decentralized_pg": True},
}


def train(overrides: dict[str, Any]) -> Run:
    run, batches = start(tiny_config(model__num_layers=2, **overrides))
    with closing(batches):
        train_step(run, next(batches).microbatches)
    return run


def train_packs(lengths: str, overrides: dict[str, Any]) -> Run:
    config = packed_config(lengths, overrides | {"model__num_layers": 2, "train__global_batch_size": 6})
    run = setup(config, build_tokenizer(config.tokenizer).vocab_size)
    with closing(open_steps(run, train_dataset(config), 0, training=True)) as steps:
        train_step(run, next(steps).microbatches)
    return run


def three_runs(trained: Callable[..., Run], *arguments: Any) -> list[tuple[bool, int]]:
    """Train three runs; return whether each one's model lives on, and the threads.

    gloo has three threads a group.
    """
    left = []
    for _ in range(3):
        run = trained(*arguments)
        model = weakref.ref(run.model[0])
        run.close()
        del run
        gc.collect()
        left.append((model() is not None, threads(left[0][1] if left else None)))
    return left


def threads(expected: int | None) -> int:
    """Count the threads.

    On a busy machine a thread that is ending takes a moment: it has twenty seconds.
    """
    deadline = time.monotonic() + 20
    while True:
        number = len(os.listdir("/proc/self/task"))
        if expected is None or number <= expected or time.monotonic() > deadline:
            return number
        time.sleep(0.05)


def check(ranks: list[list[tuple[bool, int]]]) -> None:
    for first, *later in ranks:
        assert not first[0]
        assert later == [first] * 2


# Its groups of two levels are among those of the decentralized ones, and the MPU's among "mpu".
SLOW = ("mpu a2a+p2p",)


@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_close_releases_everything(layout: str) -> None:
    check(run_ranks(three_runs, 4, train, LAYOUTS[layout]))


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_close_releases_groups_for_packs(layout: str, tmp_path: Path) -> None:
    check(run_ranks(three_runs, 4, train_packs, lengths_file(tmp_path), PACKED_LAYOUTS[layout]))
