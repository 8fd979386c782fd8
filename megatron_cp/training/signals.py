"""SIGINT and SIGTERM end a run after a checkpoint: noticed between steps, agreed on by all ranks."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class SignalWatch:
    """Remembers the signal that asked this rank to stop."""

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self._received = 0
        self._device = device
        self._previous = {}
        if enabled:
            for number in EXIT_CODES:
                self._previous[number] = signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def agreed(self) -> int:
        """The signal that any rank received, 0 for none; collective, the same answer on every rank."""
        received = torch.tensor(int(self._received), device=self._device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return int(received.item())

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
