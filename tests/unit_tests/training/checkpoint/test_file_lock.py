"""One process at a time locks a file, with either kind of lock.

This also holds if the file is deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_cp.training.checkpoint.file_lock import FileLock
from tests.unit_tests.training.checkpoint.test_run_lock import forked


class Holder:
    """Another process that takes a file's lock as this process would.

    It writes into the file.
    """

    def __init__(self, path: Path, last: Callable[[], object] = signal.pause) -> None:
        read, write = os.pipe()

        def hold() -> None:
            lock = FileLock(path)
            assert lock.take() is None
            lock.write("the other")
            os.write(write, b".")
            last()

        self.pid = forked(hold)
        os.close(write)
        assert os.read(read, 1) == b".", "the other process could not take the lock"
        os.close(read)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        os.waitpid(self.pid, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture(params=["open file description locks", "record locks alone"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "record locks alone":
        monkeypatch.delattr(fcntl, "F_OFD_SETLK")
    return request.param


def test_one_process_holds_it_until_it_is_killed(path: Path, kind: str) -> None:
    other = Holder(path)
    lock = FileLock(path)
    try:
        assert lock.take() == "the other"
    finally:
        other.kill()
    assert lock.take() is None and lock.in_place
    lock.release()
    Holder(path).kill()


def test_the_two_kinds_of_lock_exclude_each_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of an older version holds a record lock."""
    other = Holder(path)
    with monkeypatch.context() as without:
        without.delattr(fcntl, "F_OFD_SETLK")
        assert FileLock(path).take() == "the other"
        other.kill()
        other = Holder(path)
    assert FileLock(path).take() == "the other"
    other.kill()


def test_another_name_of_the_folder_makes_no_difference(tmp_path: Path, kind: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    other = Holder(tmp_path / "run" / "lock")
    assert FileLock(tmp_path / "link" / "lock").take() == "the other"
    other.kill()


def test_reading_the_file_does_not_drop_the_lock(path: Path) -> None:
    """A process that closes any descriptor of a file drops its record locks on it."""
    lock = FileLock(path)
    assert lock.take() is None
    path.read_text()
    pid = forked(lambda: os._exit(3 if FileLock(path).take() is None else 4))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4, "another process could take it"
    lock.release()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_forked_processes_do_not_hold_it(path: Path, kind: str, number: signal.Signals) -> None:
    """Workers and writers may outlive a killed rank for a moment."""
    read, write = os.pipe()

    def fork_and_wait() -> None:
        os.write(write, str(forked(lambda: time.sleep(60))).encode())
        signal.pause()

    other = Holder(path, fork_and_wait)
    child = int(os.read(read, 20))
    try:
        lock = FileLock(path)
        assert lock.take() == "the other", "the child that closed its copy dropped its parent's lock"
        other.kill(number)
        assert lock.take() is None, "the child still holds it"
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_on_a_deleted_file_does_not_count(path: Path, kind: str) -> None:
    lock = FileLock(path)
    assert lock.take() is None and lock.in_place
    path.unlink()
    assert not lock.in_place
    other = Holder(path)  # in a new file of that name
    assert not lock.in_place
    lock.release()
    assert lock.take() == "the other"
    assert path.read_text() == "the other", "releasing the deleted file emptied the new one"
    other.kill()


def test_a_file_that_is_replaced_while_it_is_taken_is_opened_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, replaced = os.open, iter([True, True])

    def slow(name: object, *args: int) -> int:
        descriptor = opened(name, *args)  # type: ignore[arg-type]
        if name == path and next(replaced, False):
            path.unlink()
            path.touch()
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    lock = FileLock(path)
    assert lock.take() is None and lock.in_place
    monkeypatch.setattr(os, "open", opened)
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_one_lock_type_uses_the_other_or_raises(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", unsupported)
    other, lock = Holder(path), FileLock(path)
    assert lock.take() == "the other" and not lock.unsupported
    other.kill()
    monkeypatch.setattr(fcntl, "lockf", unsupported)
    assert lock.take() is None and lock.unsupported == os.strerror(number)
    lock.release()


def test_errors_of_a_file_system_do_not_disable_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "fcntl", fail)
    with pytest.raises(OSError, match="Input/output error"):
        FileLock(path).take()
