"""Fork the gloo ranks of one test from the warmed test process.

An import of torch and megatron-core takes about ten seconds. Forking a process that has imported them takes
milliseconds. So a test calls :func:`run_ranks` with a plain function, and each rank starts warm.
"""

import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here so that no forked rank has to
import torch.distributed as dist

# On a GPU each rank starts CUDA and compiles the fused functions of megatron-core and Transformer Engine.
_TIMEOUT = 240.0 if torch.cuda.is_available() else 120.0
FAILED = "failed"
"""The file in the folder of a test's ranks that says that one of them has failed."""


class RanksFailed(AssertionError):
    """At least one forked rank raised, exited or timed out.

    The message contains the report of every rank.
    """


def free_port() -> int:
    """Return a free port for a rendezvous, below the ephemeral ones (from 32768).

    The system may give an ephemeral port to a connection of another test before a rank listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _rank_main(fn: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple, timeout: float) -> int:
    faulthandler.enable()
    stacks = open(os.path.join(folder, f"stacks{rank}"), "w")  # noqa: SIM115 - faulthandler keeps it
    faulthandler.dump_traceback_later(max(timeout - 1.0, timeout / 2), file=stacks)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    on_its_own = bool(os.environ.get("MEGATRON_CP_TEST_NO_INIT"))
    try:
        if not on_its_own:
            dist.init_process_group(
                os.environ.get("MEGATRON_CP_TEST_BACKEND", "gloo"),
                store=dist.FileStore(os.path.join(folder, "store"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        payload, code = (True, fn(*args)), 0
    except BaseException:
        payload, code = (False, traceback.format_exc()), 1
    with open(os.path.join(folder, f"rank{rank}.tmp"), "wb") as file:
        pickle.dump(payload, file)
    os.rename(os.path.join(folder, f"rank{rank}.tmp"), os.path.join(folder, f"rank{rank}"))
    if code == 0 and not on_its_own:
        _wait_for_other_ranks(folder, world_size, timeout)
    if code == 0 and dist.is_initialized():
        # Leaving gloo's threads alive aborts about one exit in five.
        dist.destroy_process_group()
    return code


def _wait_for_other_ranks(folder: str, world_size: int, timeout: float) -> None:
    """Wait until every rank has reported, or one failed.

    A rank that exits closes its connections. Another rank that still builds a group with it would fail (gloo:
    "Connection closed by peer").
    """
    reports = [os.path.join(folder, f"rank{rank}") for rank in range(world_size)] if world_size > 1 else []
    failed, deadline = os.path.join(folder, FAILED), time.monotonic() + timeout
    while not all(map(os.path.exists, reports)) and not os.path.exists(failed) and time.monotonic() < deadline:
        time.sleep(0.002)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = _TIMEOUT, grace: float = 5.0
) -> list[Any]:
    """Run ``fn(*args)`` on forked gloo ranks; return results in rank order.

    The default process group is initialized, unless the environment variable ``MEGATRON_CP_TEST_NO_INIT`` is set: for
    tests that start torch.distributed themselves, and whose ranks exit at any time. Results must be picklable.

    Raises :class:`RanksFailed` with the tracebacks of all failed ranks. Ranks that still run ``timeout`` seconds after
    the start, or ``grace`` seconds after a failure, are killed.
    """
    if torch.cuda.is_initialized() or _autograd_runs_for_a_gpu():
        raise RuntimeError(
            "CUDA runs in the test process, and no forked rank could use it: use it in ranks only. Where there is a "
            "GPU a backward pass starts it, also one of host tensors"
        )
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        pids: dict[int, int] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        # A rank collects only objects that it made. Objects of the parent, such as a store of torch, crash when
        # destroyed in a fork, and handlers of other packages run right after it.
        gc.freeze()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = _rank_main(fn, rank, world_size, folder, args, timeout)
                finally:
                    try:
                        sys.stdout.flush()
                        sys.stderr.flush()
                    finally:  # also where a test closed them: a rank that continues would be a second pytest
                        os._exit(code)
            pids[pid] = rank
        gc.unfreeze()
        statuses = _wait(pids, folder, time.monotonic() + timeout, grace)
        results, problems = [], []
        for rank in range(world_size):
            path = os.path.join(folder, f"rank{rank}")
            ok, value = False, f"died without a report ({statuses.get(rank, 'unknown')}){_stacks(folder, rank)}"
            if os.path.exists(path):
                with open(path, "rb") as file:
                    ok, value = pickle.load(file)
                if ok and statuses.get(rank) != "exit 0":
                    ok, value = False, f"finished its function but then ended with {statuses.get(rank)}"
            if ok:
                results.append(value)
            else:
                problems.append(f"--- rank {rank} of {world_size}: {value}")
        if problems:
            raise RanksFailed("\n".join(problems))
        return results


def _autograd_runs_for_a_gpu() -> bool:
    """Return whether this process has autograd threads for a GPU.

    torch has no function for it.
    """
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has ended
            if name.read_text().startswith("pt_autograd"):
                return True
    return False


def _stacks(folder: str, rank: int) -> str:
    """Return the stack of a rank that timed out."""
    path = os.path.join(folder, f"stacks{rank}")
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        text = file.read()
    return f"\n{text}" if text else ""


def _wait(pids: dict[int, int], folder: str, deadline: float, grace: float) -> dict[int, str]:
    """Wait for all children.

    After a failure or the deadline, kill the others after a grace period.
    """
    alive, statuses = dict(pids), {}
    while alive:
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = alive.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                statuses[rank] = f"exit {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                if code != 0:
                    Path(folder, FAILED).touch()
                    # If one rank has failed, the others fail or hang in a collective: give them time to report.
                    deadline = min(deadline, time.monotonic() + grace)
        if alive and time.monotonic() > deadline:
            for pid, rank in alive.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                statuses[rank] = "killed: still running at the deadline"
            break
        time.sleep(0.005)
    return statuses
