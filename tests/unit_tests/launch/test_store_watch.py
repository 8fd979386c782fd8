"""Requests to a frozen store end within the time limit."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_cp.config.run_config import DistributedConfig
from megatron_cp.launch import rendezvous, store_watch
from megatron_cp.launch.store_watch import BoundedStore, StoreSilentError, watch, within
from megatron_cp.parallel.device import start_distributed
from tests.kept_store import KeptStore
from tests.ranks import RanksFailed, run_ranks

SILENT = "which keeps torch.distributed's store at 127.0.0.1:"


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptStore]:
    keeper = KeptStore()
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(keeper.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(store_watch, "_TURN", 0.2)
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_ANSWER", 0.2)
    yield keeper
    keeper.close()


def test_a_request_ends_within_its_limit(keeper: KeptStore) -> None:
    """torch's client ignores its timeout and waits until the process ends."""
    store = dist.TCPStore("127.0.0.1", keeper.port)
    store.set("key", "value")
    assert BoundedStore(store, 30.0).get("key") == b"value"
    store.set_timeout(timedelta(seconds=0.2))
    bounded = BoundedStore(store, 0.5)
    keeper.freeze()
    for request in (lambda: bounded.check(["key"]), lambda: within(0.5, store.clone)):
        began = time.monotonic()
        with pytest.raises(
            StoreSilentError, match=f"the launcher, {SILENT}{keeper.port}, has not answered for 0.5 sec"
        ):
            request()
        assert time.monotonic() - began < 30.0


def test_errors_are_raised_in_the_calling_thread() -> None:
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)


def test_requests_work_without_new_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert within(5.0, lambda: "answer") == "answer"


def begin(seconds: float) -> str:
    try:
        start_distributed(DistributedConfig(distributed_timeout_minutes=seconds / 60))
    except StoreSilentError as silent:
        return f"{silent.on_all_ranks} {silent}"
    return "started"


def test_ranks_do_not_wait_for_each_other_in_a_frozen_store(keeper: KeptStore) -> None:
    keeper.freeze()
    reports = run_ranks(begin, 2, 1.0)
    assert [text.split(":")[0] for text in reports] == ["False rank 0", "True rank 1"], reports
    assert all(SILENT in text and "has not answered for 1.2 seconds" in text for text in reports), reports


def wait(folder: str, how: str, keeper: int) -> None:
    rank = os.environ["RANK"]
    sys.stderr = Path(folder, f"stderr{rank}").open("w", buffering=1)  # noqa: SIM115 - until the rank ends
    assert begin(2.0) == "started"
    dist.barrier()
    if rank == "0":
        os.kill(keeper, signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
    time.sleep(60.0)


@pytest.mark.parametrize("how", ["frozen", "gone"])
def test_waiting_ranks_exit_and_one_reports_why(keeper: KeptStore, how: str, tmp_path: Path) -> None:
    """Ranks may wait in a step, or in one of torch's own store requests."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(wait, 2, str(tmp_path), how, keeper.pid, timeout=40.0, grace=20.0)
    assert str(failed.value).count("died without a report (exit 1)") == 2, failed.value
    text = "".join(path.read_text() for path in sorted(tmp_path.glob("stderr*")))
    assert text.startswith("megatron-cp: rank 0: the launcher, ") and text.count("\n") == 1, text


def pause(folder: str) -> None:
    """Watch the store in a process that is frozen for longer than the limit."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    watch(store, 1.0)
    Path(folder, f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(2.0)


def test_a_rank_that_was_frozen_continues(keeper: KeptStore, tmp_path: Path) -> None:
    def freeze_for_long() -> None:
        path = tmp_path / "pid0"
        while not path.exists() or not path.read_text():
            time.sleep(0.01)
        os.kill(int(path.read_text()), signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(int(path.read_text()), signal.SIGCONT)

    helper = threading.Thread(target=freeze_for_long)
    helper.start()
    run_ranks(pause, 1, str(tmp_path))
    helper.join()
