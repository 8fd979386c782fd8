"""Rendezvous in the launcher's store, which reports missing ranks."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_cp import cli
from megatron_cp.common.errors import DataError, RuntimeFault
from megatron_cp.config.run_config import DistributedConfig
from megatron_cp.launch.rendezvous import publish_failure
from megatron_cp.parallel.device import start_distributed
from megatron_cp.training import train  # noqa: F401 - so that no forked rank has to
from tests.kept_store import KeptStore
from tests.ranks import run_ranks

HOST = socket.gethostname()
TINY = ["train", "--recipe", "llama_tiny_p2p_pretrain_config", "model.context_parallel_size=1"]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """Start a store as torchrun does."""
    store = KeptStore()
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield dist.TCPStore("127.0.0.1", store.port)
    store.close()


def start_again(counts: list[int], late: int | None, between_nodes: bool) -> bool:
    """Return whether this start sees an earlier start's keys."""
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[rank])
    if between_nodes:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    if rank == late:
        time.sleep(1.5)
    start_distributed(DistributedConfig(distributed_timeout_minutes=1.0))
    store = _get_default_store()
    seen = store.check(["address"])
    dist.barrier()
    store.set("address", "of a rank that dies")
    return seen


@pytest.mark.parametrize("between_nodes", [False, True])
def test_restarted_ranks_ignore_keys_of_the_previous_attempt(launcher: dist.TCPStore, between_nodes: bool) -> None:
    """torchrun keeps one store for all restarts, with addresses of ended ranks.

    A node counts its own failures: here the second node failed three times, the first never.
    """
    for restart, late in enumerate((None, 0, 1)):
        counts = [0 if between_nodes else restart, restart]
        assert run_ranks(start_again, 2, counts, late, between_nodes) == [False, False]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_was_not_in_the_last_start_waits_for_the_next(launcher: dist.TCPStore, late: int) -> None:
    """The rank finds the name of a start without an answer.

    All other ranks may have joined already.
    """
    launcher.set("start", "the_last")
    before = dist.PrefixStore("the_last", launcher)
    before.set("here_0", f"{HOST} nccl")
    before.add("times_0", 1)
    assert run_ranks(start_again, 2, [0, 0], late, True) == [False, False]


def test_failures_of_an_earlier_start_are_ignored(launcher: dist.TCPStore) -> None:
    """A node that only started again with the others counts no restart."""
    launcher.set("start", "the_last")
    launcher.set("gone", "1 rank 3, on node5, exited before the rendezvous: its GPU was lost")
    assert run_ranks(start_again, 2, [0, 1], 1, True) == [False, False]


def test_nccl_keys_of_an_earlier_start_are_deleted(launcher: dist.TCPStore) -> None:
    """The watchdog reads this key without a prefix, and ends the rank."""
    run_ranks(start_again, 2, [0, 0], None, True)
    launcher.set("exception_dump", "1")
    run_ranks(start_again, 2, [0, 1], None, True)
    assert not launcher.check(["exception_dump"])


def problem_at_rendezvous(backends: list[str | None], minutes: float) -> str:
    """Return the problem of a rank that starts with its entry of ``backends``."""
    os.environ["WORLD_SIZE"] = str(len(backends))
    backend = backends[int(os.environ["RANK"])]
    try:
        start_distributed(DistributedConfig(distributed_timeout_minutes=minutes, distributed_backend=backend))
    except RuntimeFault as fault:
        return f"{fault.on_all_ranks} {fault}"
    dist.barrier()  # one that leaves breaks the connections that another is still building
    dist.destroy_process_group()
    return ""


def test_missing_ranks_are_named(launcher: dist.TCPStore) -> None:
    """A node without a file exits before the rendezvous."""
    (message, again) = run_ranks(problem_at_rendezvous, 2, [None] * 5, 0.02)
    assert message == again and message.startswith(
        "True ranks 2-4 did not reach the rendezvous within 0.02 minutes. Fix: read the logs"
    )


def test_all_ranks_reach_the_rendezvous(launcher: dist.TCPStore) -> None:
    assert run_ranks(problem_at_rendezvous, 4, [None] * 4, 1.0) == [""] * 4


def test_different_backends_are_named(launcher: dist.TCPStore) -> None:
    """A node without visible GPUs would use gloo instead of NCCL."""
    reports = run_ranks(problem_at_rendezvous, 4, ["gloo", "gloo", "staged", "gloo"], 1.0)
    assert len(set(reports)) == 1 and reports[0].startswith(
        "True ranks use different communication backends; training not started: gloo, without a GPU, on ranks 0-1, 3 "
        f"({HOST}); staged, without a GPU, on rank 2 ({HOST}). Fix: the same dist.distributed_backend"
    ), reports


def with_a_failing_rank(restarts: str, fail: Callable[[], None]) -> str:
    """Return two of three ranks' error about the last one, on two nodes."""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": restarts}
    if os.environ["RANK"] == "2":
        cli.failures._REPORT_DELAY = 0.0
        with contextlib.suppress(ZeroDivisionError):
            fail()
        return ""
    try:
        start_distributed(DistributedConfig(distributed_timeout_minutes=1 if restarts == "0" else 0.02))
    except (DataError, RuntimeFault) as fault:
        return f"{type(fault).__name__}: {fault}"
    return "met"


def lacks_a_file() -> None:
    publish_failure(DataError("corpus.bin: no such file"))
    publish_failure(DataError("what comes of it"))


def test_an_early_failure_is_published_to_other_nodes(launcher: dist.TCPStore) -> None:
    message = f"DataError: rank 2, on {HOST}, exited before the rendezvous: corpus.bin: no such file"
    assert run_ranks(with_a_failing_rank, 3, "0", lacks_a_file) == [message, message, ""]


def test_restarted_ranks_ignore_earlier_failures(launcher: dist.TCPStore) -> None:
    """Both starts use the same store."""
    reports = run_ranks(with_a_failing_rank, 3, "1", lacks_a_file)
    assert reports[0].startswith("RuntimeFault: rank 2 did not reach the rendezvous within 0.02 minutes")


def breaks_a_rule() -> None:
    assert cli.main([*TINY, "train.global_batch_size=0"]) == 2


def lacks_its_corpus() -> None:
    assert (
        cli.main([*TINY, "train.global_batch_size=48", "dataset.kind=indexed", "dataset.data_path=absent/corpus"]) == 2
    )


def has_a_broken_gpu() -> None:
    def dispatch(argv: object) -> int:
        raise RuntimeFault("GPU 3 cannot be used")

    cli._dispatch = dispatch
    assert cli.main(TINY) == 1


def has_a_bug() -> None:
    def dispatch(argv: object) -> int:
        return 1 // 0

    cli._dispatch = dispatch
    cli.main(TINY)


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (breaks_a_rule, "error A1: train.global_batch_size=0: must be an integer of at least 1"),
        (lacks_its_corpus, "absent/corpus"),
        (has_a_broken_gpu, "GPU 3 cannot be used"),
        (has_a_bug, "ZeroDivisionError('integer division or modulo by zero')"),
    ],
)
def test_every_early_exit_is_published_to_other_nodes(
    launcher: dist.TCPStore, fail: Callable[[], None], message: str
) -> None:
    """Errors with exit code 2 must end the other nodes with 2, too."""
    reports = run_ranks(with_a_failing_rank, 3, "0", fail)
    kind = "DataError" if fail in (breaks_a_rule, lacks_its_corpus) else "RuntimeFault"
    assert reports[0] == reports[1] and reports[0].startswith(
        f"{kind}: rank 2, on {HOST}, exited before the rendezvous: {message}"
    )


def fail_after_the_rendezvous() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    start_distributed(DistributedConfig())
    publish_failure(DataError("too late"))
    dist.barrier()


def test_nothing_is_published_after_the_rendezvous(launcher: dist.TCPStore) -> None:
    """The store may be gone by then, and torch would print a stack at each try."""
    run_ranks(fail_after_the_rendezvous, 2)
    assert not launcher.check(["gone"])
