"""Time limits for requests to torch.distributed's store.

torch's TCPStore client (2.11) reads answers without a time limit: while the store's process is frozen, every method
and the constructor block. So each of our requests runs in a thread with a limit. torch's own requests (gloo and NCCL
exchange addresses through the store) cannot be wrapped: a thread checks the store regularly, and ends this process if
no answer comes within the limit.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_cp.common.errors import EXIT_FAILED, RuntimeFault
from megatron_cp.common.terminal import say
from megatron_cp.launch import launcher

RESTART = "Fix: start the run again; it resumes from the last checkpoint (torchrun --max-restarts=N restarts it)."
_PAUSE = 10.0  # seconds between checks, at most; a tenth of the limit if that is less
_TO_END = 2.0  # seconds for a thread that may be in a request
_TURN = 3.0  # seconds that other ranks of a node wait for the rank that reports

# Held by a rank that completes a collective operation alone: the watch does not end the process meanwhile.
completing = threading.Lock()

_stopped = threading.Event()
_watching: threading.Thread | None = None


class StoreSilentError(RuntimeFault):
    """Error for a store that does not answer; ``why`` leaves out rank and fix."""

    def __init__(self, seconds: float) -> None:
        where = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '?')}"
        keeper = "the launcher" if _launcher_keeps_it() else "rank 0"
        self.why = (
            f"{keeper}, which keeps torch.distributed's store at {where}, has not answered for {seconds:.3g} seconds "
            "(frozen, exited or unreachable)"
        )
        super().__init__(f"rank {launcher.rank()}: {self.why}. {RESTART}", on_all_ranks=not _reports())


def within[T](seconds: float, request: Callable[[], T]) -> T:
    """Return ``request()``, run in a thread with a time limit.

    Raises:
        StoreSilentError: the request takes longer. Its thread stays behind.
    """
    answer: Future[T] = Future()

    def make() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # raised below, in the thread that asked
            answer.set_exception(error)

    try:
        threading.Thread(target=make, name="store request", daemon=True).start()
    except RuntimeError:  # the limit of threads is reached
        make()
    # In pieces: if this process itself is frozen for an hour, the hour counts as one piece.
    pieces = math.ceil(seconds)
    if not any(wait([answer], seconds / pieces).done for _ in range(pieces)):
        raise StoreSilentError(seconds)
    return answer.result()


class BoundedStore:
    """Store whose requests raise StoreSilentError after ``seconds``."""

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: within(self._seconds, partial(getattr(self._store, name), *arguments))


def watch(store: dist.Store, seconds: float) -> None:
    """Start a thread that ends this process if the store does not answer."""
    global _watching
    _stopped.clear()
    _watching = threading.Thread(target=_watch, args=(store, seconds), name="store watch", daemon=True)
    _watching.start()


def stop_watching() -> None:
    """Stop the watch: this rank exits by itself."""
    _stopped.set()
    if _watching is not None:
        join_before_exit(_watching)


def join_before_exit(thread: threading.Thread) -> None:
    """Wait up to two seconds for another thread that must end.

    A thread that returns from a store request while Python exits aborts the process (C++: "terminate called without an
    active exception").
    """
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_TO_END)


def _watch(store: dist.Store, seconds: float) -> None:
    own: dist.Store | None = None  # a separate connection: another request may block the shared one
    while not _stopped.wait(min(_PAUSE, seconds / 10)):
        try:
            own = own or within(seconds, store.clone)  # type: ignore[attr-defined]
            within(seconds, lambda own=own: own.check(["any key"]))  # type: ignore[misc]
        except StoreSilentError as silent:
            error = silent
        except dist.DistError:  # the store is gone; gloo's ranks find out earlier, by broken connections
            _stopped.wait(seconds)
            error = StoreSilentError(seconds)
        else:
            continue
        end_process("" if error.on_all_ranks else str(error), _stopped, _TURN)


def end_process(text: str, stopped: threading.Event, turn: float) -> None:
    """End this process with ``text``, unless ``stopped`` is set.

    Without ``text`` another rank reports, and this rank first waits ``turn`` seconds for ``stopped``.
    """
    if not text:
        stopped.wait(turn)
    with completing:
        if stopped.is_set():
            return
        try:
            if text:
                say(f"megatron-cp: {text}", file=sys.stderr, flush=True)
        finally:
            os._exit(EXIT_FAILED)


def _launcher_keeps_it() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _reports() -> bool:
    """Return whether this rank reports for its node."""
    first = 1 if not _launcher_keeps_it() and launcher.rank() < (launcher.local_world_size() or 1) else 0
    return (launcher.local_rank() or first) == first
