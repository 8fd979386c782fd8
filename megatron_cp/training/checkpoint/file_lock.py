"""Hold an exclusive lock of the operating system on one file for as long as this process lives.

The lock is an open-file-description lock where the file system supports these (Linux, fcntl(2)), else a POSIX record
lock. Both kinds exclude each other, also between machines where a network file system supports locks. The kernel drops
a process's record locks on a file as soon as the process closes *any* descriptor of that file. So a process must never
open the file a second time while it holds the lock: :class:`FileLock` reads and writes through its own descriptor.

A forked process inherits an open file description. It closes its copy at once, so that the lock ends with the process
that took it and not with a data worker or checkpoint writer that lives longer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# A file system or kernel that lacks a kind of lock. EINVAL: Linux before 3.15 for open-file-description locks.
_UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_HELD_BY_ANOTHER = {errno.EACCES, errno.EAGAIN}
_TRIES = 10  # openings of a file that other processes keep replacing


class FileLock:
    """A lock on the file ``path``, which is made if it is missing.

    Attributes:
        unsupported: why the file system locks no files ("" where it does); :meth:`take` succeeds without a lock there.
    """

    def __init__(self, path: Path) -> None:
        self.unsupported = ""
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> str | None:
        """Try once to take the lock; returns None when taken, else the text that its holder wrote into the file.

        Raises:
            OSError: the file cannot be opened or locked.
        """
        for _ in range(_TRIES):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self.unsupported = lock(descriptor)
                if self._is_file_of(descriptor):
                    self._descriptor, descriptor = descriptor, -1
                    _held.add(self)
                    return None
            except OSError as error:
                if error.errno not in _HELD_BY_ANOTHER:
                    raise
                return os.pread(descriptor, 4096, 0).decode("utf-8", "replace")
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        raise OSError(errno.ESTALE, "other processes repeatedly replaced this file", str(self._path))

    @property
    def in_place(self) -> bool:
        """Whether the locked file still has its name: a lock on a deleted file keeps nobody out."""
        return self._descriptor is not None and self._is_file_of(self._descriptor)

    def write(self, text: str) -> None:
        """Replace the file's content, and flush it to the disk."""
        if self._descriptor is None:
            raise ValueError(f"{self._path} is not locked")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)
        os.fsync(self._descriptor)

    def release(self) -> None:
        """Empty the file and unlock it."""
        if self._descriptor is None:
            return
        with suppress(OSError):  # a full or lost disk: the lock must go all the same
            os.ftruncate(self._descriptor, 0)
        self._close()

    def _close(self) -> None:
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _is_file_of(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return False


_held: set[FileLock] = set()


def _close_copies() -> None:
    """In a forked process; the parent's lock stays."""
    for each in list(_held):
        each._close()


os.register_at_fork(after_in_child=_close_copies)


def lock(descriptor: int) -> str:
    """Lock the whole file, without waiting; returns "", or why neither kind of lock is supported there.

    Raises:
        OSError: another process holds a lock (``EACCES`` or ``EAGAIN``), or the file system failed.
    """
    # struct flock: l_type, l_whence, l_start, l_len (0: to the end), l_pid (must be 0)
    whole_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kinds: list[Callable[[], object]] = [lambda: fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)]
    if sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK"):  # elsewhere struct flock is laid out otherwise
        kinds.insert(0, lambda: fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole_file))
    why = ""
    for take in kinds:
        try:
            take()
            return ""
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            why = error.strerror or str(error)
    return why
