"""The ranks of a test exit together, and a failed rank blocks no other."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, run_ranks


def other_rank_exists() -> bool:
    pids = torch.zeros(2, dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    if dist.get_rank() == 0:
        time.sleep(0.3)  # rank 1 has finished long before; without waiting it would exit within milliseconds
    try:
        os.kill(int(pids[1]), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_finished_rank_waits_for_all_others() -> None:
    assert run_ranks(other_rank_exists, 2) == [True, True]


def one_ends() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_a_rank_that_dies_is_named_and_blocks_no_other() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=r"^--- rank 1 of 2: died without a report \(exit 3\)$"):
        run_ranks(one_ends, 2, grace=60.0)
    assert time.monotonic() - started < 30
