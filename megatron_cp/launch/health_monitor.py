"""When a collective fails, or would wait for ever: which rank is gone, what it said last, what the others were doing.

Nothing is exchanged while all is well but a look at the store that started torch.distributed, about once a second, from
a thread. A rank that fails, or whose collective fails, raises an alarm there, which the threads of all living ranks
answer, also of those that still wait in a collective of their own. Who does not answer is gone or frozen.

A gloo rank hears of a lost peer by an exception, and explains it (``exchanges`` tells by what it is known). With NCCL
there is none: the rank waits, until torch ends it after a timeout. So where an alarm does not end a rank, its thread
does. A frozen rank raises no alarm: the first rank that torch ends at the timeout does, or its launcher for it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from megatron_cp.common.errors import RuntimeFault, first_line
from megatron_cp.common.limits import reached_limit
from megatron_cp.launch.exchanges import is_exchange, is_network_error, name_of_exchange
from megatron_cp.launch.failure_store import FailureReport, FailureStore
from megatron_cp.launch.rendezvous import begun, common_store, is_waited_for
from megatron_cp.launch.store_watch import (
    GO_ON,
    BoundedStore,
    StoreSilentError,
    end_process,
    join_before_exit,
    stop_watching,
    within,
)

_NAME = "roll_call"
_LOOK = 1.0  # seconds between looks at the store
_GRACE = 10.0  # seconds from an alarm, for this rank to end by itself
_ANSWER = 5.0  # seconds for the store to answer one request of a rank that is to end


class HealthMonitor:
    """This rank's part in finding out who is missing. ``doing`` tells what the rank is at.

    ``timeout``: seconds that an exchange may take; None: without limit.
    """

    def __init__(self, store: dist.Store | None = None, timeout: float | None = None) -> None:
        self.doing: Callable[[], str] = lambda: "set-up"
        self._timeout = timeout
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # A connection of its own: over the main thread's this one would wait as long as that, which may be in there for
        # what a lost rank would have written (NCCL's first collective of a group).
        self._store = dist.PrefixStore(_NAME, (store or common_store()).clone())  # type: ignore[attr-defined]
        self._board = FailureStore(self._store, self._rank, self._size)
        self._since = time.monotonic()  # this rank is at the same since then
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roll-call", daemon=True)
        if self._size > 1:
            self._thread.start()

    def close(self) -> None:
        """This rank ends by itself, from here on."""
        self._closed.set()
        join_before_exit(self._thread)

    def _watch(self) -> None:
        at = ""
        try:
            while not self._closed.wait(_LOOK):
                if (doing := self.doing()) != at:
                    at, self._since = doing, time.monotonic()
                if self._board.alarm():
                    self._board.sign(self.doing())
                    if not self._closed.wait(_GRACE):
                        self._end()
        except RuntimeError:  # the rank that keeps the store is gone; this rank's own collectives will say so
            return

    def _end(self) -> None:
        """End this process, whose main thread waits for a rank that will not come, with a word by one of all ranks."""
        who, lowest, _ = self._find_out()
        text = f"rank {self._rank}, {self.doing()}: waited in vain because {who}. {GO_ON}"
        end_process(text if self._rank == lowest else "", self._closed, 2 * _LOOK)  # launchers end all with the first

    def _find_out(self, *, broken: bool = False) -> FailureReport:
        """Ask why the run cannot go on. ``broken``: this rank lost a connection."""
        failures = FailureStore(BoundedStore(self._store, _ANSWER), self._rank, self._size)
        try:
            return failures.find_out(self.doing(), broken=broken)
        except StoreSilentError as silent:
            return FailureReport(silent.why, -1 if silent.on_all_ranks else self._rank, all_well=False)
        except RuntimeError:
            return FailureReport("rank 0 is gone, and with it the store through which the ranks met", self._rank, False)

    def _fell(self, why: str) -> None:
        """Leave word that this rank cannot go on."""
        with suppress(RuntimeError):
            within(_ANSWER, lambda: self._board.fell(why))

    def _has_waited(self) -> bool:
        """Whether this rank is at the same for almost as long as an exchange may take."""
        return self._timeout is not None and time.monotonic() - self._since > 0.9 * self._timeout - 2 * _LOOK

    def explain(self, error: BaseException) -> RuntimeFault | None:
        """The fault that an exception of this rank's stands for; ``None`` if it speaks for itself.

        Says who is missing if a collective failed. The others hear of this rank's own failure. This rank is to end.
        """
        self.close()
        stop_watching()
        where = f"rank {self._rank}, {self.doing()}"
        if isinstance(error, RuntimeFault):
            if not error.on_all_ranks:
                self._fell(first_line(error))
            return None
        if isinstance(error, torch.OutOfMemoryError):
            self._fell("out of memory")
            return RuntimeFault(
                f"{where}: out of GPU memory ({first_line(error)}). Activations shrink with more "
                "model.context_parallel_size, model.recompute_granularity=full or a smaller train.micro_batch_size."
            )
        if (limit := reached_limit(error)) is not None:
            self._fell(limit)
            return RuntimeFault(f"{where}: {limit}. It said: {first_line(error)}")
        if isinstance(error, OSError):
            self._fell(str(error))
            return RuntimeFault(f"{where}: {error}")
        if self._size > 1 and is_exchange(error):
            why, lowest, all_well = self._find_out(broken=self._has_waited() or is_network_error(error))
            if not all_well:
                link = "although" if why.startswith("every") else "because"
                what = f"{name_of_exchange(error)} failed {link} {why}. It said: {first_line(error)}"
                return RuntimeFault(f"{where}: {what}. {GO_ON}", on_all_ranks=self._rank != lowest)
        self._fell(f"{type(error).__name__}: {first_line(error)}")
        return None


def report_for_killed_ranks(address: str, port: int, rank: int, number: int) -> None:
    """What a launcher says, in the store that it keeps, for a rank that was killed by a signal: with NCCL the ranks of
    other nodes would wait for it until torch ends them."""
    how = f"it was killed by signal {number} ({signal.strsignal(number)})"

    def say() -> None:
        store = begun(address, port, rank, how)
        if store is not None:
            FailureStore(dist.PrefixStore(_NAME, store), rank, 0).fell(how)

    with suppress(RuntimeError):  # who keeps the store is gone or frozen, too
        within(_ANSWER, say)


def stopped_before_rendezvous(address: str, port: int, rank: int) -> bool:
    """Check, for a launcher, whether the other ranks wait for a rank that has stopped and that they cannot know of."""
    with suppress(RuntimeError):  # the process that keeps the store is gone or frozen
        return within(_ANSWER, lambda: is_waited_for(address, port, rank))
    return False
