"""Limits that a rank reaches are named on every rank.

They are limits of memory, files, processes and shared memory.
"""

import io
import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.common.limits import reached_limit
from megatron_cp.training import train  # noqa: F401 - so that no forked rank has to
from megatron_cp.training.monitor.metrics import start_logging
from megatron_cp.training.monitor.sinks import JsonLines, writing_into
from tests.ranks import run_ranks
from tests.unit_tests.training.test_stopping import at_iteration

INFINITE = resource.RLIM_INFINITY


def leave_memory() -> None:
    """Limit this process to 16 MiB more memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24, INFINITE))


def a_tensor() -> None:
    leave_memory()
    torch.ones(2**28)


def an_object() -> None:
    leave_memory()
    bytearray(2**30)


def a_mapping() -> None:
    leave_memory()
    mmap.mmap(-1, 2**30)


def leave_files(count: int) -> None:
    """Limit this process to ``count`` more open files.

    The limit is one of the files' numbers.
    """
    free = (number for number in range(4096) if not os.path.exists(f"/proc/self/fd/{number}"))
    resource.setrlimit(resource.RLIMIT_NOFILE, ([next(free) for _ in range(count + 1)][-1], 4096))


def a_file() -> None:
    leave_files(0)
    Path("/dev/null").read_text()


def a_group() -> None:
    leave_files(1)
    torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)


def as_another_user(start: Callable[[], Any]) -> None:
    """Start with a limit of one process, which the superuser does not have."""
    os.setresuid(65534, 65534, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    try:
        start()
    finally:
        os.seteuid(0)


def a_thread() -> None:
    as_another_user(lambda: threading.Thread(target=print).start())


def a_process() -> None:
    as_another_user(os.fork)


def named(reach: Callable[[], None]) -> str | None:
    try:
        reach()
    except Exception as error:
        return reached_limit(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))  # for this rank to report
    return "not reached"


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
LIMITS = [
    *((each, "ulimit -v=") for each in (a_tensor, an_object, a_mapping)),
    *((each, "ulimit -n=") for each in (a_file, a_group)),
    *(pytest.param(each, "ulimit -u=1: ", marks=as_root) for each in (a_thread, a_process)),
]


@pytest.mark.parametrize(("reach", "reported"), LIMITS)
def test_a_limit_is_named_with_its_value(reach: Callable[[], None], reported: str) -> None:
    (text,) = run_ranks(named, 1, reach)
    assert text is not None and text.startswith(reported) and f"Fix: {reported[:9]} " in text, text


def test_other_errors_are_about_no_limit() -> None:
    for error in (ValueError("Too many open files"), OSError(2, "No such file"), RuntimeError("shapes differ")):
        assert reached_limit(error) is None


def test_a_rank_that_reaches_a_limit_names_it_to_all(cli: Any) -> None:
    code, text = cli("train.train_iters=5", before=at_iteration(2, 1, a_tensor))
    assert code == 1, text
    assert "megatron-cp: rank 1, other of iteration 2: ulimit -v=" in text and "Fix: ulimit -v unlimited" in text, text
    assert "because rank 1 had failed: ulimit -v=" in text, text


@pytest.mark.slow
@pytest.mark.parametrize(("reach", "reported"), LIMITS[1:])
def test_every_limit_is_named_to_all(cli: Any, reach: Callable[[], None], reported: str) -> None:
    code, text = cli("train.train_iters=5", before=at_iteration(2, 1, reach))
    assert code == 1, text
    assert f"megatron-cp: rank 1, other of iteration 2: {reported}" in text, text
    assert f"because rank 1 had failed: {reported}" in text, text


def write_a_long_line(folder: str) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, INFINITE))
    try:
        with writing_into(Path(folder)):
            JsonLines(Path(folder, "metrics.jsonl"), None).write(1, {"lm_loss": 200 * "x"})
    except RuntimeFault as fault:
        return str(fault)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (INFINITE, INFINITE))
    return "written"


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    (text,) = run_ranks(write_a_long_line, 1, str(tmp_path))
    assert "ulimit -f=100: the limit of bytes in a file is reached. Fix: ulimit -f unlimited" in text, text


def test_a_limit_of_open_files_is_named_before_the_rendezvous(cli: Any) -> None:
    """torch would try to connect again until the time limit."""
    code, text = cli("train.train_iters=5", before=lambda: leave_files(5))
    assert code == 1 and text.count("the limit of open files is reached. Fix: ulimit -n 65536") == 2, text


def mount(folder: str, options: str) -> None:
    """Mount a file system for this rank alone; it ends with the rank."""
    os.unshare(os.CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


@as_root
@pytest.mark.parametrize("size", [pytest.param("4k", marks=pytest.mark.slow), "40k"])
def test_full_shared_memory_is_named(cli: Any, size: str) -> None:
    """Neither semaphores (4k) nor batches (40k) fit."""
    arguments = ["train.train_iters=5", "dataset.num_workers=1", "dataset.seq_length=16384"]
    code, text = cli(*arguments, before=lambda: mount("/dev/shm", f"size={size}"))
    assert code == 1 and "/dev/shm=0 MiB: shared memory" in text and "dataset.num_workers=0" in text, text


@as_root
@pytest.mark.parametrize(
    ("disk", "options", "why"),
    [
        ("run", "size=32k", "No space left on device"),
        pytest.param("charts", "size=16k", "No space left on device", marks=pytest.mark.slow),
        pytest.param("charts", "ro", "Read-only file system", marks=pytest.mark.slow),
    ],
)
def test_metrics_that_cannot_be_written_end_the_run(
    cli: Any, tmp_path: Path, disk: str, options: str, why: str
) -> None:
    """One message must appear, and no thread's traceback.

    TensorBoard's files may be on another disk than the rest.
    """
    arguments = ["logger.tensorboard=true", f"logger.tensorboard_dir={tmp_path}/{disk}/tensorboard"]
    code, text = cli(
        *arguments,
        "train.train_iters=60",
        "model.context_parallel_size=1",
        ranks=1,
        before=lambda: mount(str(tmp_path / disk), options),
    )
    assert code == 1 and f"/{disk}" in text and f" cannot be written: {why}. " in text, text
    assert text.count("megatron-cp: ") == 1 and "thread" not in text, text


def test_a_thread_that_fails_takes_one_line() -> None:
    (text,) = run_ranks(fail_in_a_thread, 1)
    assert text.startswith("[rank 3] thread worker failed, the run continues: ZeroDivisionError: "), text
    assert "\n" not in text


def fail_in_a_thread() -> str:
    written, sys.stderr = sys.stderr, io.StringIO()
    start_logging(3, live=False)
    thread = threading.Thread(target=lambda: 1 // 0, name="worker")
    thread.start()
    thread.join()
    text, sys.stderr = sys.stderr.getvalue(), written
    return text.strip().partition("] ")[2]
