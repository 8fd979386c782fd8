"""Each kind of exchange with a lost peer ends in one message."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cp.launch import health_monitor
from megatron_cp.launch.failure_store import FailureStore
from megatron_cp.launch.health_monitor import HealthMonitor
from tests.kept_store import KeptStore
from tests.ranks import run_ranks

RANKS, LOST, LIMIT = 3, 2, 2.5
slow = pytest.mark.slow


def ones(count: int = 3) -> torch.Tensor:
    return torch.ones(count)


def new_group() -> None:
    dist.new_group(timeout=timedelta(seconds=LIMIT))


def all_gather() -> None:
    dist.all_gather([ones() for _ in range(RANKS)], ones())


def all_to_all() -> None:
    dist.all_to_all_single(ones(), ones())


def reduce_scatter() -> None:
    dist.reduce_scatter_tensor(ones(1), ones())


def receive() -> None:
    dist.recv(ones(), LOST)


def receive_later() -> None:
    handle = dist.irecv(ones(), LOST)
    assert handle is not None
    handle.wait()


def receive_in_a_batch() -> None:
    for handle in dist.batch_isend_irecv([dist.P2POp(dist.irecv, ones(), LOST), dist.P2POp(dist.isend, ones(), LOST)]):
        handle.wait()


def send_much() -> None:
    handle = dist.isend(ones(1 << 24), LOST)
    assert handle is not None
    handle.wait()


def broadcast_objects() -> None:
    dist.broadcast_object_list([None], LOST)


def gather_objects() -> None:
    dist.all_gather_object([None] * RANKS, "text")


def reduce_later() -> None:
    handle = dist.all_reduce(ones(), async_op=True)
    assert handle is not None
    handle.wait(timedelta(seconds=10))


def coalesced() -> None:
    with dist._coalescing_manager(async_ops=True) as manager:
        for _ in range(2):
            dist.all_reduce(ones(), async_op=True)
    manager.wait()


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        handle = dist.all_reduce(gradient, async_op=True)
        assert handle is not None
        handle.wait()
        return gradient


def in_backward() -> None:
    x = ones().requires_grad_()
    InBackward.apply(x).sum().backward()


def in_a_hook() -> None:
    x = ones().requires_grad_()
    x.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
    x.sum().backward()


def after_an_error() -> None:
    """Catch an error and publish it to all ranks; gloo's text has no name."""
    try:
        receive()
    except RuntimeError:
        all_gather()


EXCHANGES = [
    lambda: dist.all_reduce(ones()),
    dist.barrier,
    new_group,
    all_gather,
    all_to_all,
    reduce_scatter,
    receive,
    receive_later,
    receive_in_a_batch,
    send_much,
    broadcast_objects,
    gather_objects,
    reduce_later,
    coalesced,
    in_backward,
    in_a_hook,
    after_an_error,
]
NAMES = ["all_reduce", *(each.__name__ for each in EXCHANGES[1:])]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves() -> None:
    os._exit(0)


def frozen() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_a_peer(folder: str, port: int, exchange: Callable[[], None], lost: Callable[[], None]) -> None:
    """Write this rank's report, and whether this rank prints it."""
    health_monitor._LOOK = 0.1
    FailureStore.__init__.__defaults__ = (2.0,)  # seconds to sign
    rank, store = int(os.environ["RANK"]), dist.TCPStore("127.0.0.1", port)
    seconds = timedelta(seconds=LIMIT)
    # The limit is for the exchange: on a busy machine ranks come to life further apart.
    store.set(f"alive{rank}", "")
    store.wait([f"alive{other}" for other in range(RANKS)], timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=seconds)
    roll = HealthMonitor(store, timeout=LIMIT)
    dist.barrier()
    if rank == LOST:
        Path(folder, "lost").write_text(str(os.getpid()))
        return lost()
    began = time.monotonic()
    try:
        exchange()
        Path(folder, f"reported{rank}").write_text("nothing: it did not fail")
    except Exception as error:
        fault = roll.explain(error)
        took = time.monotonic() - began
        text = "Traceback: " + traceback.format_exc() if fault is None else f"{fault.on_all_ranks} {fault}"
        Path(folder, f"reported{rank}").write_text(text if took < LIMIT + 10.0 else f"after {took} seconds: {text}")
    while not all(Path(folder, f"reported{other}").exists() for other in range(RANKS - 1)):
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(int(Path(folder, "lost").read_text()), signal.SIGKILL)
    os._exit(0)


def errors_of(tmp_path: Path, exchange: Callable[[], None], lost: Callable[[], None]) -> list[str]:
    with closing(KeptStore()) as store, suppress(AssertionError):
        run_ranks(lose_a_peer, RANKS, str(tmp_path), store.port, exchange, lost, timeout=60, grace=25)
    return [(tmp_path / f"reported{rank}").read_text() for rank in range(RANKS - 1)]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")


FAST = [(after_an_error, frozen), *((each, killed) for each in (receive, new_group, reduce_later, in_a_hook))]
WAYS = [
    pytest.param(each, lost, id=f"{name}-{lost.__name__}", marks=[] if (each, lost) in FAST else slow)
    for each, name in zip(EXCHANGES, NAMES, strict=True)
    for lost in (killed, leaves, frozen)
]


@pytest.mark.parametrize(("exchange", "lost"), WAYS)
def test_a_lost_peer_is_named(tmp_path: Path, exchange: Callable[[], None], lost: Callable[[], None]) -> None:
    errors = errors_of(tmp_path, exchange, lost)
    assert errors[0].startswith("False rank 0, set-up: ") and errors[1].startswith("True rank 1, set-up: "), errors
    for text in errors:
        assert "failed because rank 2 does not answer (killed, crashed or frozen). Error: " in text, text


def mismatched() -> None:
    """Call with a wrong argument on one rank; the others wait for its part."""
    if int(os.environ["RANK"]) == 0:
        dist.all_to_all_single(ones(), ones(5))
    dist.all_to_all_single(ones(), ones())


def keep_them_waiting() -> None:
    """Stay busy for longer than the time limit."""
    time.sleep(3.5 * LIMIT)


def receive_or_gather() -> None:
    """Receive from a busy rank on rank 1, and later from rank 1 on rank 0.

    Rank 1 waits for the whole limit, rank 0 for less.
    """
    if int(os.environ["RANK"]) == 0:
        time.sleep(LIMIT / 2)
        dist.recv(ones(), 1)
    dist.recv(ones(), LOST)


def test_a_wrong_argument_keeps_its_traceback(tmp_path: Path) -> None:
    errors = errors_of(tmp_path, mismatched, keep_them_waiting)
    assert errors[0].startswith("Traceback"), errors
    assert "failed because rank 0 had failed" in errors[1], errors


def test_a_rank_that_is_late_is_named(tmp_path: Path) -> None:
    errors = errors_of(tmp_path, receive_or_gather, keep_them_waiting)
    for text in errors:
        assert "failed although every rank still answers (ranks 0-2: set-up). Error: " in text, errors
