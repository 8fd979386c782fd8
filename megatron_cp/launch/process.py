"""Links between a process and its parent, and commands that start programs."""

from __future__ import annotations

import ctypes
import os
import select
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megatron_cp.common.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OF_SIGNAL
from megatron_cp.common.terminal import say

_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)
_LAUNCHER = "MEGATRON_CP_LAUNCHER"
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def end_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux).

    The parent is the thread that forked this process: it must live as long as the parent does.

    Args:
        parent: the parent's process id. If that process has ended already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
        if parent is not None and os.getppid() != parent:
            os._exit(EXIT_FAILED)


def announce_launcher() -> None:
    """Let the ranks that this process will start check whether it still runs."""
    os.environ[_LAUNCHER] = f"{os.getpid()} {_namespace()}"


def has_own_launcher() -> bool:
    """Return whether ``megatron_cp.torchrun`` started this process."""
    return _LAUNCHER in os.environ


def end_with_launcher() -> None:
    """End this rank when torchrun is killed; does nothing without torchrun.

    By SIGKILL: torchrun keeps the store, without which ranks cannot report failures. Checkpoints stay complete or
    absent.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    pid, _, namespace = os.environ.get(_LAUNCHER, "").partition(" ")
    if pid and namespace == _namespace() and not Path("/proc", pid).exists():  # it ended before the line above
        say("megatron-cp: the launcher was killed; aborting", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)


def end_when_interrupted() -> None:
    """End this process at SIGINT with one line, until a command sets its own handler."""

    def end(number: int, frame: FrameType | None) -> None:
        say("megatron-cp: interrupted", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, end)


def signals_to_stop_at() -> list[signal.Signals]:
    """List the signals that stop a run; not SIGHUP if it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in EXIT_OF_SIGNAL if not (ignored and number == signal.SIGHUP)]


@contextmanager
def handled(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle signals by ``handler`` in the body, then restore the handlers."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _namespace() -> str:
    """Return the namespace of process ids: a container may have its own."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return "unknown"


def drop_lost_output() -> None:
    """Redirect output to nowhere if the terminal or the pipe's reader is gone.

    Otherwise writing raises an error. Both usually come with SIGHUP.
    """
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        with suppress(OSError):
            if any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0)):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def program(name: str, module: str = "megatron_cp") -> str:
    """Return the shell command that starts a program of this environment.

    Args:
        module: module for ``python -m`` if the program is not installed.
    """
    started = sys.argv[0] if os.path.basename(sys.argv[0]) == name else sys.executable
    found, own = shutil.which(name), Path(started).with_name(name)
    if not own.exists():
        return name if found else f"{shlex.quote(sys.executable)} -m {module}"
    if found and os.path.samefile(found, own):
        return name
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))
