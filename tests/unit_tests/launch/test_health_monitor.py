"""Ranks without an exception for a lost rank, as with NCCL, exit by a thread."""

import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cp.launch import health_monitor
from megatron_cp.launch.health_monitor import HealthMonitor
from megatron_cp.launch.rendezvous import common_store
from megatron_cp.launch.store_watch import completing, stop_watching, watch
from tests.kept_store import KeptStore
from tests.ranks import RanksFailed, run_ranks

RANKS, FALLING = 3, 2
MESSAGE = "megatron-cp: rank 0, forward of iteration 3: aborting because rank 2 had failed: out of memory. Fix: "


def waiting(folder: str, port: int, blocks: Any) -> None:
    """Fail on the last rank; block the others' main threads forever."""
    health_monitor._GRACE = 1.0
    rank = dist.get_rank()
    sys.stderr = Path(folder, f"stderr{rank}").open("w", buffering=1)  # noqa: SIM115 - until the rank ends
    store = dist.TCPStore("127.0.0.1", port)
    monitor = HealthMonitor(store)
    monitor.doing = lambda: "forward of iteration 3"
    dist.barrier()
    if rank == FALLING:
        assert "out of GPU memory" in str(monitor.explain(torch.OutOfMemoryError("tried to allocate 2 GiB")))
        return
    blocks(folder, store)
    time.sleep(300.0)


def end(tmp_path: Path, blocks: Any) -> str:
    with closing(KeptStore()) as store, pytest.raises(RanksFailed) as failed:
        run_ranks(waiting, RANKS, str(tmp_path), store.port, blocks, timeout=120, grace=60)
    report = str(failed.value)
    assert report.count("died without a report (exit 1)") == RANKS - 1 and f"rank {FALLING} of" not in report, report
    return "".join(path.read_text() for path in sorted(tmp_path.glob("stderr*")))


def nothing(folder: str, store: dist.Store) -> None:
    pass


def as_nccl_waits(folder: str, store: dist.Store) -> None:
    store.get("what another rank would have written")


@pytest.mark.parametrize("waits", [nothing, as_nccl_waits])
def test_blocked_ranks_exit_and_one_reports_why(waits: Any, tmp_path: Path) -> None:
    """Ranks blocked in a store request must exit, too.

    A group's first collective with NCCL makes such a request.
    """
    text = end(tmp_path, waits)
    assert text.startswith(MESSAGE) and text.count("\n") == 1, text


def complete(folder: str, store: dist.Store) -> None:
    with completing:
        time.sleep(6.0)
        Path(folder, f"completed{dist.get_rank()}").touch()


def test_a_save_that_can_complete_is_completed(tmp_path: Path) -> None:
    text = end(tmp_path, complete)
    assert text.startswith(MESSAGE), text
    assert {path.name for path in tmp_path.glob("completed*")} == {"completed0", "completed1"}


def threads_after_the_end() -> list[str]:
    store = dist.PrefixStore("end", common_store())
    watch(store, 0.1)
    monitor = HealthMonitor(store)
    time.sleep(0.05)
    monitor.close()
    stop_watching()
    return [each.name for each in threading.enumerate()]


def test_no_thread_requests_while_python_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that returns from a request at exit would abort the process."""
    monkeypatch.setattr(health_monitor, "_LOOK", 0.001)
    for names in run_ranks(threads_after_the_end, 2):
        assert not {"health monitor", "store watch", "store request"} & set(names), names
