"""Time limits for requests to the store of torch.distributed, and a thread that ends a rank whose store is silent.

torch's TCPStore client (2.11) reads answers without a time limit: while the process that keeps the store is frozen,
``check``, ``get``, ``add``, ``wait``, ``compare_set``, ``clone`` and the constructor block, whatever timeout they were
given. So each request of ours runs in a thread and is waited for with a limit. Requests of torch's own (gloo and NCCL
exchange addresses through the store) cannot be wrapped: a thread asks the store from time to time, and ends this
process where no answer comes within the time limit.
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

GO_ON = "Start the run again to go on from the last checkpoint (torchrun --max-restarts=N does so by itself)."
_PAUSE = 10.0  # seconds between questions, at most; a tenth of the limit where that is less
_TO_END = 2.0  # seconds, for a thread that may be in a request
_TURN = 3.0  # seconds that the other ranks of a node wait for the one that reports

# Held by a rank that completes, alone, what ranks did together: it is not ended meanwhile.
completing = threading.Lock()

_stopped = threading.Event()
_watching: threading.Thread | None = None


class StoreSilentError(RuntimeFault):
    """The process that keeps the store does not answer; ``why`` says so without this rank and what to do."""

    def __init__(self, seconds: float) -> None:
        where = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '?')}"
        keeper = "the launcher" if _launcher_keeps_it() else "rank 0"
        self.why = (
            f"{keeper}, which keeps torch.distributed's store at {where}, has not answered for {seconds:.3g} seconds "
            "(it is frozen or gone, or its machine is out of reach)"
        )
        super().__init__(f"rank {launcher.rank()}: {self.why}. {GO_ON}", on_all_ranks=not _reports())


def within[T](seconds: float, request: Callable[[], T]) -> T:
    """Return ``request()``, made in a thread of its own.

    Raises:
        StoreSilentError: it takes longer. The thread stays behind.
    """
    answer: Future[T] = Future()

    def make() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # raised below, in the thread that asked
            answer.set_exception(error)

    try:
        threading.Thread(target=make, name="store request", daemon=True).start()
    except RuntimeError:  # a limit of threads; the request can still be made
        make()
    # In pieces: if this process itself is frozen for an hour, that hour costs one of them.
    pieces = math.ceil(seconds)
    if not any(wait([answer], seconds / pieces).done for _ in range(pieces)):
        raise StoreSilentError(seconds)
    return answer.result()


class BoundedStore:
    """A store each of whose requests raises StoreSilentError where it takes more than ``seconds``."""

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: within(self._seconds, partial(getattr(self._store, name), *arguments))


def watch(store: dist.Store, seconds: float) -> None:
    """Start the thread: this process ends with one message where ``store`` is silent or gone for ``seconds``."""
    global _watching
    _stopped.clear()
    _watching = threading.Thread(target=_watch, args=(store, seconds), name="store watch", daemon=True)
    _watching.start()


def stop_watching() -> None:
    """This rank ends by itself, from here on."""
    _stopped.set()
    if _watching is not None:
        join_before_exit(_watching)


def join_before_exit(thread: threading.Thread) -> None:
    """Wait a moment for a thread that was told to end, unless it is the calling one.

    A thread that comes back from a request to the store while Python exits aborts the process (C++: "terminate called
    without an active exception").
    """
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_TO_END)


def _watch(store: dist.Store, seconds: float) -> None:
    own: dist.Store | None = None  # a connection of its own: another request may hold the shared one for long
    while not _stopped.wait(min(_PAUSE, seconds / 10)):
        try:
            own = own or within(seconds, store.clone)  # type: ignore[attr-defined]
            within(seconds, lambda own=own: own.check(["any key"]))  # type: ignore[misc]
        except StoreSilentError as silent:
            error = silent
        except dist.DistError:  # gone; ranks that use gloo find out earlier, by their broken connections
            _stopped.wait(seconds)
            error = StoreSilentError(seconds)
        else:
            continue
        end_process("" if error.on_all_ranks else str(error), _stopped, _TURN)


def end_process(text: str, stopped: threading.Event, turn: float) -> None:
    """End this process with a message, unless it is to end by itself: ``stopped``, then or within ``turn`` seconds.

    Without ``text`` another rank reports, and this one waits for its turn.
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
    """Whether this rank is the first of its node, but for a rank 0 that keeps the store: ranks cannot agree on one."""
    first = 1 if not _launcher_keeps_it() and launcher.rank() < (launcher.local_world_size() or 1) else 0
    return (launcher.local_rank() or first) == first
