"""Two runs in one folder: the second waits and resumes, or fails.

It resumes after the first has ended. If it fails, its error names the first. Also one run whose nodes do not share the
folder that it names.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cp.training.checkpoint import run_lock
from megatron_cp.training.checkpoint.files import latest_iteration
from megatron_cp.training.checkpoint.run_lock import LOCK

TWO_STEPS = ("train.train_iters=2", "scheduler.lr_decay_iters=20")


def impatient() -> None:
    run_lock.PATIENCE = 0.0


def forked(work: Callable[[], object]) -> int:
    """Fork a process that calls the function and exits without pytest's clean-up."""
    pid = os.fork()
    if not pid:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work()
        finally:
            os._exit(0)
    return pid


class Other:
    """Process that locks a folder until it is killed, or has called a function."""

    def __init__(self, folder: Path, last: Callable[[], object] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        held, ready = os.pipe()

        def hold() -> None:
            with (folder / LOCK).open("a+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)
                file.write("process 7 on elsewhere")
                file.flush()
                os.write(ready, b".")
                (last or signal.pause)()

        self.pid = forked(hold)
        assert os.read(held, 1) == b"."

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_second_run_gets_an_error_that_names_the_first(cli: Any, tmp_path: Path) -> None:
    other = Other(tmp_path / "run")
    try:
        code, text = cli(before=impatient)
    finally:
        other.end()
    assert (
        code == 1
        and f"checkpoint.save={tmp_path / 'run'}: another run writes into this folder (process 7 on elsewhere). Fix:"
        in text
    )
    assert os.listdir(tmp_path / "run") == [LOCK], "it wrote into another's folder"
    code, text = cli(before=impatient)
    assert code == 0 and "another run" not in text, "the lock outlived the process that was killed"
    assert (tmp_path / "run" / LOCK).read_text() == ""


def test_a_second_run_resumes_where_the_first_ended(cli: Any, tmp_path: Path) -> None:
    """The first one's checkpoint appears while the second waits."""
    folder, first = tmp_path / "run", tmp_path / "first"
    code, text = cli(*TWO_STEPS)
    assert code == 0, text
    folder.rename(first)
    waits = tmp_path / "waits"

    def before() -> None:
        run_lock.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: waits.touch())

    def come_to_an_end() -> None:
        while not waits.exists():
            time.sleep(0.05)
        subprocess.run(["cp", "-r", f"{first}/.", folder], check=True)

    other = Other(folder, come_to_an_end)
    code, text = cli("train.train_iters=4", "scheduler.lr_decay_iters=20", before=before)
    other.end()
    assert code == 0 and "Waiting 120 s for that run to end" in text and "resumed from iteration 2" in text, text
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "lm_loss" in line] == [1, 2, 3, 4]


def test_a_checkpoint_is_measured_while_another_run_writes(cli: Any, tmp_path: Path) -> None:
    code, text = cli()
    assert code == 0, text
    other = Other(tmp_path / "run")
    try:
        code, text = cli("train.skip_train=true", "validation.eval_iters=1", before=impatient)
    finally:
        other.end()
    assert code == 0 and "another run" not in text, text


def test_without_locks_a_run_warns_and_trains(cli: Any, tmp_path: Path) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def before() -> None:
        fcntl.lockf = fcntl.fcntl = no_locks

    code, text = cli(before=before)
    assert code == 0 and "saved checkpoint" in text, text
    warning = next(line for line in text.splitlines() if "supports no locks (No locks available)" in line)
    assert "warning: checkpoint.save=" in warning and "a second run could write into this folder" in warning, text


def test_an_unwritable_lock_is_reported(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "run" / LOCK).mkdir(parents=True)
    code, text = cli()
    assert (
        code == 1
        and text.count("cannot be written") == 1
        and f"the run folder {tmp_path / 'run'} cannot be written: Is a directory. Fix:" in text
    ), text


def test_a_run_fails_before_ranks_time_out_waiting_for_the_first(cli: Any, tmp_path: Path) -> None:
    other = Other(tmp_path / "run")
    try:
        code, text = cli("dist.distributed_timeout_minutes=0.05")
    finally:
        other.end()
    assert code == 1 and "another run writes into" in text and "aborting because" not in text, text


def held_while_training(folder: Path, without: tuple[str, ...] = ()) -> Callable[[], None]:
    """Return a function that makes a rank copy the kernel's list of locks.

    The rank calls it first. It copies the list in each step, with all files still open.
    """

    def before() -> None:
        from megatron_cp.training import loop

        for name in without:
            delattr(fcntl, name)
        train_step = loop.train_step

        def step(*args: Any) -> Any:
            result = train_step(*args)
            (folder / f"locks{os.environ['RANK']}").write_text(Path("/proc/locks").read_text())
            return result

        loop.train_step = step

    return before


@pytest.mark.parametrize(("without", "kind"), [((), "OFDLCK"), (("F_OFD_SETLK",), "POSIX")])
def test_the_kernel_has_the_lock_while_a_run_trains(
    cli: Any, tmp_path: Path, without: tuple[str, ...], kind: str
) -> None:
    """A process that closes any other descriptor of the file drops its record lock."""
    code, text = cli(before=held_while_training(tmp_path, without))
    assert code == 0, text
    number = (tmp_path / "run" / LOCK).stat().st_ino
    assert kind in locks_of(number, (tmp_path / "locks0").read_text()), (tmp_path / "locks0").read_text()
    assert not locks_of(number, Path("/proc/locks").read_text())


def locks_of(inode: int, listed: str) -> str:
    return "".join(line for line in listed.splitlines() if f":{inode} " in line)


def test_a_deleted_lock_is_taken_again_and_named(cli: Any, tmp_path: Path) -> None:
    """A lock on a deleted file excludes no other run.

    The run's folder is deleted while the run trains.
    """
    code, text = cli(*TWO_STEPS, before=lambda: after_second_step(lambda: shutil.rmtree(tmp_path / "run")))
    assert code == 0 and "was deleted or moved during training. The run continues" in text, text
    assert latest_iteration(tmp_path / "run") == 2


def test_a_run_that_lost_its_lock_does_not_save(cli: Any, tmp_path: Path) -> None:
    def replace() -> None:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "other").write_text(str(Other(tmp_path / "run").pid))

    code, text = cli(*TWO_STEPS, before=lambda: after_second_step(replace))
    os.kill(int((tmp_path / "other").read_text()), signal.SIGKILL)
    assert code == 1 and "another run writes there now (process 7 on elsewhere). Fix: set" in text, text
    assert os.listdir(tmp_path / "run") == [LOCK], "it saved into another's folder"


def after_second_step(work: Callable[[], object]) -> None:
    """Have rank 0 do ``work`` once, when all files are open and before the run saves."""
    from megatron_cp.training import loop

    train_step = loop.train_step

    def step(*args: Any) -> Any:
        result = train_step(*args)
        if os.environ["RANK"] == "0" and args[0].progress.iteration == 1:
            work()
        return result

    loop.train_step = step


def elsewhere() -> None:
    """Simulate rank 1 on a node with another folder under the same name."""
    run_lock.VISIBILITY_TIMEOUT = 0.2
    if os.environ["RANK"] == "1":
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")


def test_nodes_without_a_shared_folder_fail_before_training(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = cli("checkpoint.save=mine", before=elsewhere)
    assert code == 1 and text.startswith(
        f"megatron-cp: checkpoint.save=mine: rank 1 ({socket.gethostname()}) cannot see the folder of rank 0 (process "
    ), text
    assert os.listdir("mine") == [LOCK] and not os.listdir("elsewhere/mine"), "it trained"
    assert (tmp_path / "mine" / LOCK).read_text() == ""


def test_a_new_file_may_be_seen_late(cli: Any, tmp_path: Path) -> None:
    """A network file system may show a new file late."""

    def before() -> None:
        read_text, times = Path.read_text, iter(range(3))

        def late(path: Path, *args: Any, **kwargs: Any) -> str:
            if path.name == LOCK and os.environ["RANK"] == "1" and next(times, None) is not None:
                raise FileNotFoundError
            return read_text(path, *args, **kwargs)

        Path.read_text = late  # type: ignore[method-assign]
        run_lock._POLL = 0.01

    code, text = cli(before=before)
    assert code == 0 and "saved checkpoint" in text, text
