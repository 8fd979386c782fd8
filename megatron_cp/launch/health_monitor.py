"""Find the rank that stopped when a collective fails or hangs.

While all ranks work, a thread of each rank only checks an alarm in torch.distributed's store, about once a second. A
rank that fails, or whose collective fails, raises the alarm. The threads of all living ranks then report, also while
the main thread waits in a collective. A rank that does not report has exited or is frozen.

gloo raises an exception for a lost peer, which ``HealthMonitor.explain`` turns into a message. NCCL raises none: the
rank would wait until torch's timeout, so the thread ends the process after an alarm. A frozen rank raises no alarm;
the first rank that torch ends at the timeout does, or its launcher.
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
from megatron_cp.launch.rendezvous import common_store, is_awaited, joined_start
from megatron_cp.launch.store_watch import (
    RESTART,
    BoundedStore,
    StoreSilentError,
    end_process,
    join_before_exit,
    stop_watching,
    within,
)

_NAME = "health_monitor"
_LOOK = 1.0  # seconds between checks of the alarm
_GRACE = 10.0  # seconds after an alarm for this rank to exit by itself
_ANSWER = 5.0  # seconds for one request to the store while this rank exits


class HealthMonitor:
    """This rank's watch for failures of other ranks.

    ``doing`` returns this rank's current phase, for messages. ``timeout``: time limit of a collective in seconds; None:
    no limit.
    """

    def __init__(self, store: dist.Store | None = None, timeout: float | None = None) -> None:
        self.doing: Callable[[], str] = lambda: "set-up"
        self._timeout = timeout
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # A separate connection: the main thread's is blocked while it waits for a key of a lost rank (NCCL's first
        # collective of a group).
        self._store = dist.PrefixStore(_NAME, (store or common_store()).clone())  # type: ignore[attr-defined]
        self._failures = FailureStore(self._store, self._rank, self._size)
        self._since = time.monotonic()  # start of the current phase
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="health monitor", daemon=True)
        if self._size > 1:
            self._thread.start()

    def close(self) -> None:
        """Stop the watch: this rank exits by itself."""
        self._closed.set()
        join_before_exit(self._thread)

    def _watch(self) -> None:
        at = ""
        try:
            while not self._closed.wait(_LOOK):
                if (doing := self.doing()) != at:
                    at, self._since = doing, time.monotonic()
                if self._failures.alarm():
                    self._failures.report_alive(self.doing())
                    if not self._closed.wait(_GRACE):
                        self._end()
        except RuntimeError:  # the store's process is gone; this rank's own collectives will fail
            return

    def _end(self) -> None:
        """End this process; the lowest living rank prints why."""
        who, lowest, _ = self._diagnose()
        text = f"rank {self._rank}, {self.doing()}: aborting because {who}. {RESTART}"
        end_process(
            text if self._rank == lowest else "", self._closed, 2 * _LOOK
        )  # launchers stop all ranks at an exit

    def _diagnose(self, *, broken: bool = False) -> FailureReport:
        """Collect why the run cannot continue. ``broken``: this rank lost a connection."""
        failures = FailureStore(BoundedStore(self._store, _ANSWER), self._rank, self._size)
        try:
            return failures.diagnose(self.doing(), broken=broken)
        except StoreSilentError as silent:
            return FailureReport(silent.why, -1 if silent.on_all_ranks else self._rank, all_well=False)
        except RuntimeError:
            return FailureReport("rank 0 exited, and with it the store of torch.distributed", self._rank, False)

    def _report_failure(self, why: str) -> None:
        """Report that this rank cannot continue."""
        with suppress(RuntimeError):
            within(_ANSWER, lambda: self._failures.report_failure(why))

    def _has_waited(self) -> bool:
        """Return whether the current phase has lasted almost the whole time limit."""
        return self._timeout is not None and time.monotonic() - self._since > 0.9 * self._timeout - 2 * _LOOK

    def explain(self, error: BaseException) -> RuntimeFault | None:
        """Return the fault behind an exception; None if it needs no explanation.

        If a collective failed, the fault names the missing ranks. A failure of this rank is reported to the others.
        This rank must exit afterwards.
        """
        self.close()
        stop_watching()
        where = f"rank {self._rank}, {self.doing()}"
        if isinstance(error, RuntimeFault):
            if not error.on_all_ranks:
                self._report_failure(first_line(error))
            return None
        if isinstance(error, torch.OutOfMemoryError):
            self._report_failure("out of memory")
            return RuntimeFault(
                f"{where}: out of GPU memory ({first_line(error)}). Fix: model.recompute_granularity=full, a larger "
                "model.context_parallel_size or a smaller train.micro_batch_size."
            )
        if (limit := reached_limit(error)) is not None:
            self._report_failure(limit)
            return RuntimeFault(f"{where}: {limit}. Error: {first_line(error)}")
        if isinstance(error, OSError):
            self._report_failure(str(error))
            return RuntimeFault(f"{where}: {error}")
        if self._size > 1 and is_exchange(error):
            why, lowest, all_well = self._diagnose(broken=self._has_waited() or is_network_error(error))
            if not all_well:
                link = "although" if why.startswith("every") else "because"
                what = f"{name_of_exchange(error)} failed {link} {why}. Error: {first_line(error)}"
                return RuntimeFault(f"{where}: {what}. {RESTART}", on_all_ranks=self._rank != lowest)
        self._report_failure(f"{type(error).__name__}: {first_line(error)}")
        return None


def report_for_killed_ranks(address: str, port: int, rank: int, number: int) -> None:
    """Report, for the launcher, a rank that a signal killed.

    With NCCL, ranks of other nodes would otherwise wait for it until torch's timeout.
    """
    how = f"killed by signal {number} ({signal.strsignal(number)})"

    def publish() -> None:
        store = joined_start(address, port, rank, how)
        if store is not None:
            FailureStore(dist.PrefixStore(_NAME, store), rank, 0).report_failure(how)

    with suppress(RuntimeError):  # the process that keeps the store is gone or frozen, too
        within(_ANSWER, publish)


def stopped_before_rendezvous(address: str, port: int, rank: int) -> bool:
    """Return whether ranks wait at the rendezvous for a rank that has stopped."""
    with suppress(RuntimeError):  # the process that keeps the store is gone or frozen
        return within(_ANSWER, lambda: is_awaited(address, port, rank))
    return False
