"""Hold an exclusive operating-system lock on one file while this process lives.

The lock is an open-file-description lock where the file system supports it (Linux, fcntl(2)), else a POSIX record lock.
Both kinds exclude each other, also between machines if a network file system supports locks. The kernel drops a
process's record locks on a file when the process closes *any* descriptor of the file. A process must therefore never
open the file a second time while it holds the lock; :class:`FileLock` reads and writes through one descriptor.

A forked process inherits an open file description and closes its copy at once. The lock then ends with the process that
took it, not with a longer-lived data worker or checkpoint writer.
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

# Errors of a file system or kernel without a kind of lock. EINVAL: Linux before 3.15 for open-file-description locks.
_UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_HELD_BY_ANOTHER = {errno.EACCES, errno.EAGAIN}
_TRIES = 10  # attempts while other processes replace the file


class FileLock:
    """A lock on the file ``path``, created if missing.

    Attributes:
        unsupported: why the file system has no locks ("" if it has); :meth:`take` then succeeds without a lock.
    """

    def __init__(self, path: Path) -> None:
        self.unsupported = ""
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> str | None:
        """Try once to take the lock.

        Returns:
            None if taken, else the text that the holder wrote into the file.

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
        """Whether the locked file still has its name; a deleted file locks nothing."""
        return self._descriptor is not None and self._is_file_of(self._descriptor)

    def write(self, text: str) -> None:
        """Replace the file's content and flush it to disk."""
        if self._descriptor is None:
            raise ValueError(f"{self._path} is not locked")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)
        os.fsync(self._descriptor)

    def release(self) -> None:
        """Empty the file and unlock it."""
        if self._descriptor is None:
            return
        with suppress(OSError):  # unlock even if the disk is full or lost
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
    """Close a forked process's copies; the parent keeps its lock."""
    for each in list(_held):
        each._close()


os.register_at_fork(after_in_child=_close_copies)


def lock(descriptor: int) -> str:
    """Lock the whole file without waiting.

    Returns:
        "", or why the file system supports neither kind of lock.

    Raises:
        OSError: another process holds a lock (``EACCES`` or ``EAGAIN``), or the file system failed.
    """
    # struct flock: l_type, l_whence, l_start, l_len (0: to the end), l_pid (must be 0)
    whole_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kinds: list[Callable[[], object]] = [lambda: fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)]
    if sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK"):  # other systems have another struct flock
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
