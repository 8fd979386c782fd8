"""Starting torch.distributed."""

import os
import socket

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_cp.config import DistributedConfig, RunConfig
from megatron_cp.errors import DataError, RuntimeFault
from megatron_cp.parallel.device import start_distributed, tell_those_who_wait
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


def meeting(port: int, come: int) -> str:
    """What the first ``come`` of four ranks hear, which wait for a second."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["WORLD_SIZE"] = "4"
    try:
        start_distributed(RunConfig(dist=DistributedConfig(distributed_timeout_minutes=(1 if come == 4 else 0.02))))
    except RuntimeFault as fault:
        return f"{fault.on_all_ranks} {fault}"
    dist.destroy_process_group()
    return ""


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that lacks a file ends before it meets the others."""
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    launcher = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (said, again) = run_ranks(meeting, 2, launcher.port, 2)
    assert said == again and said.startswith(
        "True ranks 2, 3 did not come within 0.02 minutes (dist.distributed_timeout"
    )
    launcher = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(meeting, 4, launcher.port, 4) == [""] * 4


def with_one_that_cannot(port: int, restarts: str) -> str:
    """What two of three ranks, on two nodes, hear of the last one."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": restarts}
    if os.environ["RANK"] == "2":
        tell_those_who_wait(DataError("corpus.bin: no such file"))
        return ""
    try:
        start_distributed(RunConfig(dist=DistributedConfig(distributed_timeout_minutes=1 if restarts == "0" else 0.02)))
    except (DataError, RuntimeFault) as fault:
        return str(fault)
    return "met"


def test_a_rank_that_cannot_come_says_why_to_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    launcher = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    heard = run_ranks(with_one_that_cannot, 3, launcher.port, "0")
    said = f"rank 2, on {socket.gethostname()}, ended before all had met: corpus.bin: no such file"
    assert heard == [said, said, ""]
    # Started again the ranks have the same store.
    launcher = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    heard = run_ranks(with_one_that_cannot, 3, launcher.port, "1")
    assert heard[0].startswith("rank 2 did not come within 0.02 minutes")


def compile_threads() -> int:
    from torch._inductor import config

    return int(config.compile_threads)


def test_ranks_compile_without_a_process_for_each_core() -> None:
    assert run_ranks(compile_threads, 1) == [1]
