"""SIGINT and SIGTERM end a run after a checkpoint: noticed between steps, agreed on by all ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from megatron_cp.errors import EXIT_OF_SIGNAL
from megatron_cp.parallel.transfer import send

_SAME_KEY_PRESS = 1.0  # seconds: a terminal and a launcher may both pass one Ctrl-C on


class SignalWatch:
    """Remembers the signal that asked this rank to stop. A second SIGINT stops it at once, without a checkpoint."""

    def __init__(self, enabled: bool) -> None:
        self.received = 0
        self._at = 0.0
        self._previous = {}
        if enabled:
            for number in EXIT_OF_SIGNAL:
                self._previous[number] = signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._at > _SAME_KEY_PRESS:
            raise KeyboardInterrupt

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_waits(enabled: bool) -> Iterator[None]:
    """Within, SIGTERM does nothing: launchers send it to the ranks left, which have yet to say what they lost."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN) if enabled else None
    try:
        yield
    finally:
        if enabled:
            signal.signal(signal.SIGTERM, previous)


def agreed_maximum(values: Sequence[int], device: torch.device) -> list[int]:
    """The largest that any rank has of each number; one exchange, the same answer on every rank."""
    votes = send(torch.tensor([int(value) for value in values]), device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [int(vote) for vote in votes.tolist()]
