"""Starting torch.distributed."""

import os

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_cp.config import RunConfig
from megatron_cp.parallel.device import start_distributed
from tests.ranks import run_ranks


def start_again(port: int) -> bool:
    """Whether this start sees what an earlier one wrote into the launcher's store."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    start_distributed(RunConfig())
    store = _get_default_store()
    seen = store.check(["address"])
    dist.barrier()
    store.set("address", "of a rank that dies")
    return seen


def test_restarted_ranks_do_not_read_what_dead_ones_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps one store for all restarts: the addresses of the dead would be found there."""
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    launcher = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for restart in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        assert run_ranks(start_again, 2, launcher.port) == [False, False]


def compile_threads() -> int:
    from torch._inductor import config

    return int(config.compile_threads)


def test_ranks_compile_without_a_process_for_each_core() -> None:
    assert run_ranks(compile_threads, 1) == [1]
