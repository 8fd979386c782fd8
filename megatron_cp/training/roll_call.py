"""When a collective fails, or would wait for ever: which rank is gone, what it said last, what the others were doing.

Nothing is exchanged while all is well but a look at the store that started torch.distributed, about once a second, from
a thread. A rank that fails, or whose collective fails, raises an alarm there, which the threads of all living ranks
answer, also of those that still wait in a collective of their own. Who does not answer is gone or frozen.

A gloo rank hears of a lost peer by an exception, and explains it. With NCCL there is none: the rank waits, until torch
ends it after a timeout. So where an alarm does not end a rank, its thread does. A frozen rank raises no alarm: threads
whose ranks have not moved until shortly before that timeout sign, and one of them says who did not. That ends nobody,
since a long save or evaluation looks the same.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from megatron_cp.errors import EXIT_FAILED, RuntimeFault
from megatron_cp.parallel.meeting import begun, common_store
from megatron_cp.terminal import say
from megatron_cp.training.board import Board, Store

_NAME = "roll_call"
_LOOK = 1.0  # seconds between looks at the store
_GRACE = 10.0  # seconds from an alarm, for this rank to end by itself
_SIGNING = 20.0  # seconds between the first thread's signature at a standstill and the last's
_GO_ON = "Start the run again to go on from the last checkpoint (torchrun --max-restarts=N does so by itself)."

# Held by a rank that completes, alone, what ranks did together: it is not ended meanwhile.
completing = threading.Lock()


class RollCall:
    """This rank's part in finding out who is missing. ``doing`` tells what the rank is at, ``step`` in which step.

    ``standstill``: seconds after which a rank that is still at the same has not moved; None: no rank is asked.
    """

    def __init__(self, store: dist.Store | None = None, standstill: float | None = None) -> None:
        self.doing: Callable[[], str] = lambda: "set-up"
        self.step: Callable[[], int] = lambda: 0
        self._standstill = standstill
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # A connection of its own: over the main thread's this one would wait as long as that, which may be in there for
        # what a lost rank would have written (NCCL's first collective of a group).
        self._store = dist.PrefixStore(_NAME, (store or common_store()).clone())  # type: ignore[attr-defined]
        self._board = Board(cast(Store, self._store), self._rank, self._size)  # torch's stub lacks append
        self._closed = threading.Event()
        if self._size > 1:
            threading.Thread(target=self._watch, name="roll-call", daemon=True).start()

    def close(self) -> None:
        """This rank ends by itself, from here on."""
        self._closed.set()

    def _watch(self) -> None:
        at, since, told = "", time.monotonic(), -1
        try:
            while not self._closed.wait(_LOOK):
                if (doing := self.doing()) != at:
                    at, since = doing, time.monotonic()
                elif self._standstill and time.monotonic() - since > self._standstill and told != self.step():
                    told = self.step()
                    self._tell_of_standstill(at, told)
                if self._board.alarm():
                    self._board.sign(self.doing())
                    if not self._closed.wait(_GRACE):
                        self._end()
        except RuntimeError:  # the rank that keeps the store is gone; this rank's own collectives will say so
            return

    def _tell_of_standstill(self, at: str, step: int) -> None:
        store = dist.PrefixStore(f"standstill in step {step}", self._store)
        board = Board(cast(Store, store), self._rank, self._size, _SIGNING)
        who, lowest = board.find_out(at)
        if self._rank == lowest and not self._closed.is_set() and self.doing() == at:
            minutes = (self._standstill or 0.0) / 60
            text = f"rank {self._rank}, {at}, has not moved for {minutes:.3g} minutes: {who}"
            say(f"megatron-cp: {text}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        """End this process, whose main thread waits for a rank that will not come, with a word by one of all ranks."""
        who, lowest = self._find_out()
        if self._rank != lowest:
            self._closed.wait(2 * _LOOK)  # launchers end all ranks with the first
        with completing:
            if self._closed.is_set():
                return
            try:
                if self._rank == lowest:
                    where = f"rank {self._rank}, {self.doing()}"
                    say(f"megatron-cp: {where}: waited in vain because {who}. {_GO_ON}", file=sys.stderr, flush=True)
            finally:
                os._exit(EXIT_FAILED)

    def _find_out(self) -> tuple[str, int]:
        """Why the run cannot go on, and the rank that is to say so."""
        try:
            return self._board.find_out(self.doing())
        except RuntimeError:
            return "rank 0 is gone, and with it the store through which the ranks met", self._rank

    def _fell(self, why: str) -> None:
        """Leave word that this rank cannot go on."""
        with suppress(RuntimeError):
            self._board.fell(why)

    def explain(self, error: BaseException) -> RuntimeFault | None:
        """The fault that an exception of this rank's stands for; ``None`` if it speaks for itself.

        Says who is missing if a collective failed. The others hear of this rank's own failure. This rank is to end.
        """
        self.close()
        where = f"rank {self._rank}, {self.doing()}"
        if isinstance(error, RuntimeFault):
            if not error.on_all_ranks:
                self._fell(_first_line(error))
            return None
        if isinstance(error, torch.OutOfMemoryError):
            self._fell("out of memory")
            return RuntimeFault(
                f"{where}: out of GPU memory ({_first_line(error)}). Activations shrink with more "
                "model.context_parallel_size, model.recompute_granularity=full or a smaller train.micro_batch_size."
            )
        if isinstance(error, OSError) and not is_lost_connection(error):
            self._fell(str(error))
            return RuntimeFault(f"{where}: {error}")
        if self._size == 1 or not is_lost_connection(error):
            self._fell(f"{type(error).__name__}: {_first_line(error)}")
            return None
        who, lowest = self._find_out()
        return RuntimeFault(
            f"{where}: {collective_of(error)} failed because {who}. It said: {_first_line(error)}. {_GO_ON}",
            on_all_ranks=self._rank != lowest,
        )


def say_for_the_killed(address: str, port: int, rank: int, number: int) -> None:
    """What a launcher says, in the store that it keeps, for a rank that was killed by a signal: with NCCL the ranks of
    other nodes would wait for it until torch ends them."""
    how = f"it was killed by signal {number} ({signal.strsignal(number)})"
    with suppress(RuntimeError):  # who keeps the store is gone, too
        store = begun(address, port, rank, how)
        if store is not None:
            Board(cast(Store, dist.PrefixStore(_NAME, store)), rank, 0).fell(how)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed for want of a peer, rather than this rank by itself."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        mark in text for mark in ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    )


def collective_of(error: BaseException) -> str:
    """The torch.distributed call that failed and who made it, from the traceback."""
    collective, caller = "", ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.name == "distributed_c10d.py":
            collective = collective or name
        elif {"megatron_cp", "megatron"} & set(path.parts) and not collective:
            caller = f"{path.stem}.{name}"
    return f"{collective or 'an exchange'} in {caller}" if caller else collective or "a collective"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0]
