"""Stop a run after a checkpoint on SIGINT, SIGTERM or SIGHUP.

Signals are read between steps and reported to all ranks.
"""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager, ExitStack
from types import FrameType

from megatron_cp.launch.process import drop_lost_output, handled, signals_to_stop_at

_SAME_KEY_PRESS = 1.0  # seconds: a terminal and a launcher may both pass on one Ctrl-C


class SignalWatch(ExitStack):
    """Stores the first signal that asked this rank to stop.

    A second SIGINT raises KeyboardInterrupt at once, without a checkpoint.
    """

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.received = 0
        self._at = 0.0
        self.enter_context(handled(signals_to_stop_at() if enabled else (), self._store_signal))

    def _store_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            drop_lost_output()
        if not self.received:
            self.received, self._at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._at > _SAME_KEY_PRESS:
            raise KeyboardInterrupt


def ignore_sigterm(enabled: bool) -> AbstractContextManager[None]:
    """Ignore SIGTERM and SIGHUP while this rank reports its error.

    Launchers send them to the remaining ranks as soon as one rank has failed.
    """
    return handled((signal.SIGTERM, signal.SIGHUP) if enabled else (), signal.SIG_IGN)
