"""When a collective fails: which rank is gone, what it said last, and what the others were doing.

Nothing is exchanged while all is well but a look at the store that started torch.distributed, about once a second, from
a thread. The rank whose collective fails calls the roll there; the threads of all living ranks answer, also of those
that still wait in a collective of their own. Who does not answer is gone or frozen.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_cp.errors import RuntimeFault, shown

_LOOK = 1.0  # seconds between looks at the store
_PATIENCE = 4.0  # seconds to wait for answers: several looks
_CALL = "call"


@dataclass(frozen=True)
class Roll:
    """Who answered: what each present rank was doing, what each fallen one said, and who said nothing."""

    present: dict[int, str]
    fallen: dict[int, str]
    missing: list[int]

    def __str__(self) -> str:
        reasons = [f"rank {rank} had failed: {why}" for rank, why in self.fallen.items()]
        if self.missing:
            ranks = shown([str(rank) for rank in self.missing], ", ", most=16)
            those = f"rank {ranks} is" if len(self.missing) == 1 else f"ranks {ranks} are"
            reasons.append(f"{those} gone (killed, crashed or frozen)")
        if reasons:
            return "; ".join(reasons)
        doing = [f"rank {rank}: {what}" for rank, what in list(self.present.items())[:8]]
        return f"every rank still answers ({'; '.join(doing)})"


class RollCall:
    """This rank's part in finding out who is missing. ``doing`` tells what the rank is at."""

    def __init__(self, store: dist.Store | None = None) -> None:
        self.doing: Callable[[], str] = lambda: "set-up"
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore("megatron_cp/roll_call", store or _get_default_store())
        self._closed = threading.Event()
        if self._size > 1:
            threading.Thread(target=self._answer_when_called, name="roll-call", daemon=True).start()

    def _answer_when_called(self) -> None:
        try:
            while not self._closed.wait(_LOOK):
                if self._store.check([_CALL]):
                    self._store.set(f"here/{self._rank}", self.doing())
                    return
        except RuntimeError:  # the rank that keeps the store is gone; this rank's own collectives will say so
            return

    def close(self) -> None:
        self._closed.set()

    def fell(self, why: str) -> None:
        """Leave word that this rank cannot go on, for the others' report."""
        try:
            self._store.set(f"fell/{self._rank}", why)
        except RuntimeError:
            return

    def call(self) -> Roll:
        """Ask who is there; takes a few seconds.

        Raises:
            RuntimeError: the store is gone.
        """
        present: dict[int, str] = {}
        fallen: dict[int, str] = {}
        self._store.set(_CALL, "")
        self._store.set(f"here/{self._rank}", self.doing())
        deadline = time.monotonic() + _PATIENCE
        while True:
            waiting = [rank for rank in range(self._size) if rank not in present and rank not in fallen]
            for rank in waiting:
                for kind, answers in (("fell", fallen), ("here", present)):
                    if self._store.check([f"{kind}/{rank}"]):
                        answers[rank] = self._store.get(f"{kind}/{rank}").decode()
                        break
            if len(present) + len(fallen) == self._size or time.monotonic() > deadline:
                answered = present.keys() | fallen.keys()
                return Roll(present, fallen, [rank for rank in range(self._size) if rank not in answered])
            time.sleep(0.1)

    def explain(self, error: BaseException) -> RuntimeFault | None:
        """The fault that an exception of this rank's stands for; ``None`` if it speaks for itself.

        Says who is missing if a collective failed. The others hear of this rank's own failure.
        """
        where = f"rank {self._rank}, {self.doing()}"
        if isinstance(error, RuntimeFault):
            if not error.on_all_ranks:
                self.fell(_first_line(error))
            return None
        if isinstance(error, torch.OutOfMemoryError):
            self.fell("out of memory")
            return RuntimeFault(
                f"{where}: out of GPU memory ({_first_line(error)}). Activations shrink with more "
                "model.context_parallel_size, model.recompute_granularity=full or a smaller train.micro_batch_size."
            )
        if isinstance(error, OSError) and not is_lost_connection(error):
            self.fell(str(error))
            return RuntimeFault(f"{where}: {error}")
        if self._size == 1 or not is_lost_connection(error):
            self.fell(f"{type(error).__name__}: {_first_line(error)}")
            return None
        lowest = self._rank
        try:
            roll = self.call()
            who, lowest = str(roll), min(roll.present)
        except RuntimeError:
            who = "rank 0 is gone, and with it the store through which the ranks met"
        return RuntimeFault(
            f"{where}: {collective_of(error)} failed because {who}. It said: {_first_line(error)}. Start the run again "
            "to go on from the last checkpoint (torchrun --max-restarts=N does so by itself).",
            on_all_ranks=self._rank != lowest,
        )


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
