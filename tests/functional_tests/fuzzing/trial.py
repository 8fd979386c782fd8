"""Run a command in a forked process under limits, and list faults of its end."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_FINE = (0, 1, 2)
_FILE_BYTES = 1 << 30  # the largest file that a trial may write


@dataclass(frozen=True)
class Limits:
    """Limits of one trial: seconds, and bytes of address space beyond the parent's."""

    seconds: float = 60.0
    memory: int = 3 << 30


@dataclass(frozen=True)
class Ended:
    """End of a trial: exit code (negative for a signal), seconds, and all faults."""

    code: int
    seconds: float
    problems: list[str]


class Trial:
    """Run ``command()`` in its own process.

    The process works in ``folder/work`` and may write to ``folder/work/out``.
    """

    def __init__(self, command: Callable[[], int], folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        for name in ("work/out", "home", "tmp"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._before = _listing(folder)
        self._began = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _child(command, folder, limits)
            finally:
                os._exit(99)

    def ended(self) -> Ended | None:
        """Return the end, or None while the process runs."""
        seconds = time.monotonic() - self._began
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        late = pid == 0 and seconds > self._limits.seconds
        if late:
            os.kill(self._pid, signal.SIGKILL)
            pid, status = os.waitpid(self._pid, 0)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        problems = [f"ran longer than {self._limits.seconds:g} s"] if late else []
        if not late and code not in _FINE:
            problems.append(f"ended with {code}" if code > 0 else f"killed by {signal.Signals(-code).name}")
        reported = "".join((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        if "Traceback (most recent call last)" in reported:
            problems.append(f"traceback: {_last_error(reported)}")
        elif code in (1, 2) and not reported.strip():
            problems.append("ended without a word")
        if left := _left_processes(self._pid):
            problems.append(f"left processes: {left}")
        after = _listing(self._folder)
        if changed := sorted(path for path in self._before | after if self._before.get(path) != after.get(path)):
            problems.append(f"wrote elsewhere: {', '.join(changed[:5])}")
        return Ended(code, seconds, problems)


def _child(command: Callable[[], int], folder: Path, limits: Limits) -> None:
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.update(CUDA_VISIBLE_DEVICES="", HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"))
    tempfile.tempdir = None
    os.chdir(folder / "work")
    _obey_modes()
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (space + limits.memory,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.9 * limits.seconds)
    try:
        code = command()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _obey_modes() -> None:
    """Make file modes apply to root too, by dropping all capabilities."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())


def _listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and change time of all files that must not be written.

    Links are not followed.
    """
    found: dict[str, tuple[int, int, int]] = {}
    for root, folders, files in os.walk(folder):
        inside = os.path.relpath(root, folder)
        if inside == "work":
            folders.remove("out")
        for name in (*folders, *files):
            path = os.path.normpath(os.path.join(inside, name))
            if path not in ("stdout", "stderr"):
                status = os.lstat(os.path.join(root, name))
                size = 0 if name in folders else status.st_size
                found[path] = (status.st_mode, size, status.st_mtime_ns if name in files else 0)
    return found


def _left_processes(session: int) -> str:
    """Kill and return the remaining processes of a session."""
    left = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            if words[0] != "Z" and int(words[3]) == session:
                command = Path("/proc", name, "cmdline").read_text()  # empty while the process starts its program
                left.append(f"{name} {command.replace(chr(0), ' ')[:80]}")
                os.kill(int(name), signal.SIGKILL)
        except OSError:
            continue
    return "; ".join(left)


def _last_error(reported: str) -> str:
    lines = reported[reported.rfind("Traceback (most recent call last)") :].splitlines()[1:]
    where = [line.strip() for line in lines if line.startswith("  File")]
    what = next((line for line in lines if line and not line.startswith(" ")), "")
    return f"{what[:200]} ({where[-1] if where else 'nowhere'})"
