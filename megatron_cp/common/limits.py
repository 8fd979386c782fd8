"""System limits that a process has reached, and how to raise them. Pure."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from megatron_cp.common.errors import UnusableCheckpoint, first_line

_CGROUP = Path("/sys/fs/cgroup")


def reached_limit(error: BaseException) -> str | None:
    """Describe the limit behind an exception, and its fix; None if there is none.

    Judged by type and number if the exception has them, else by text: C++ code and other processes have only that.
    """
    number = error.errno if isinstance(error, OSError) else None
    text = str(error) if isinstance(error, RuntimeError | ImportError) else ""

    def is_about(*numbers: int, words: tuple[str, ...] = ()) -> bool:
        return number in numbers or any(each in text for each in (*map(os.strerror, numbers), *words))

    if is_about(errno.EMFILE, errno.ENFILE):
        return _too_few("open files", "ulimit -n", resource.RLIMIT_NOFILE, 65536)
    if is_about(words=("shared memory",)):  # torch's text, also from DataLoader processes
        return shared_memory_full()
    in_words = ("can't allocate memory", "bad_alloc", "failed to map segment")
    if isinstance(error, MemoryError) or is_about(errno.ENOMEM, words=in_words):
        return _memory()
    if is_about(errno.EAGAIN, words=("can't start new thread",)):
        found = _too_few("processes and threads", "ulimit -u", resource.RLIMIT_NPROC, 65536)
        return f"{found}{_of_cgroup('pids.max', ' (docker run --pids-limit=-1)')}"
    if is_about(errno.EFBIG):
        return _too_few("bytes in a file", "ulimit -f", resource.RLIMIT_FSIZE, None)
    return None


def in_one_line(error: BaseException) -> str:
    """Describe an error in one line; the first rank's of ``CheckpointException``."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, UnusableCheckpoint):
        return str(error)
    limit = reached_limit(error)
    return f"{type(error).__name__}: {first_line(error)}{f' ({limit})' if limit else ''}"


def describe_file_limit(needed: int) -> str | None:
    """Describe the limit of open files if ``needed`` more would exceed it.

    torch.distributed does not name it: it retries connections until its timeout.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or not os.path.isdir("/proc/self/fd"):
        return None
    if soft - len(os.listdir("/proc/self/fd")) >= needed:
        return None
    return _too_few("open files", "ulimit -n", resource.RLIMIT_NOFILE, max(65536, 2 * needed))


def _too_few(what: str, command: str, kind: int, enough: int | None) -> str:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    wanted = "unlimited" if enough is None else str(enough)
    if hard is not None and (enough is None or hard < enough):
        wanted = f"{wanted}, as root or in /etc/security/limits.conf (the hard limit is {hard})"
    value = "unlimited" if soft is None else soft
    return f"{command}={value}: the limit of {what} is reached. Fix: {command} {wanted}"


def _memory() -> str:
    less = "a smaller train.micro_batch_size or fewer ranks on this machine"
    for command, kind in (("ulimit -v", resource.RLIMIT_AS), ("ulimit -d", resource.RLIMIT_DATA)):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            kibibytes = soft // 1024
            return f"{command}={kibibytes}: host memory is used up. Fix: {command} unlimited, or {less}"
    return f"host memory is used up{_of_cgroup('memory.max', ' (Slurm: sbatch --mem=0)')}. Fix: {less}"


def shared_memory_full() -> str:
    """Describe the limit of shared memory, which some calls report as a full disk."""
    where = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    size = "" if where is None else f"={where.f_frsize * where.f_blocks // 2**20} MiB"
    return (
        f"/dev/shm{size}: shared memory, which dataset.num_workers use to pass batches, is full. "
        "Fix: dataset.num_workers=0, or mount -o remount,size=8G /dev/shm (docker run --shm-size=8g)"
    )


def _of_cgroup(name: str, how: str) -> str:
    """Describe a limit of this process's control group; empty if not set."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        values = [(folder / name).read_text().strip() for folder in (_CGROUP / group.lstrip("/"), _CGROUP)]
    except OSError:
        return ""
    set_to = [value for value in values if value != "max"]
    return f"; the control group's {name} is {set_to[0]}{how}" if set_to else ""
