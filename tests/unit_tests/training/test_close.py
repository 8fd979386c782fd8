"""A run that is closed leaves nothing behind in its process: neither its model nor its process groups' threads."""

import gc
import os
import weakref
from typing import Any

import pytest

from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.layouts import CP2, CP4, HCP, TP2

LAYOUTS: dict[str, dict[str, Any]] = {
    "mpu": CP2 | TP2,
    "mpu a2a+p2p": CP4 | HCP,
    "decentralized a2a+p2p": CP4 | HCP | {"dist__use_decentralized_pg": True},
    "overlapped": CP2 | {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True},
}


def train_and_close(overrides: dict[str, Any]) -> tuple[bool, int]:
    """Of a run that trained a step: whether its model lives on, and the threads there are (gloo: three a group)."""
    run, batches, num_microbatches = start(tiny_config(**overrides))
    train_step(run, batches, num_microbatches)
    model = weakref.ref(run.model[0])
    run.close()
    del run, batches
    gc.collect()
    return model() is not None, len(os.listdir("/proc/self/task"))


def three_runs(overrides: dict[str, Any]) -> list[tuple[bool, int]]:
    return [train_and_close(overrides) for _ in range(3)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_stays(layout: str) -> None:
    for first, *later in run_ranks(three_runs, 4, LAYOUTS[layout]):
        assert not first[0]
        assert later == [first] * 2
