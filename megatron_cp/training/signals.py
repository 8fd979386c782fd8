"""Stop a run after a checkpoint on SIGINT, SIGTERM or SIGHUP.

Signals are read between steps and reported to all ranks.
"""

from __future__ import annotations

import logging
import signal
import time
from contextlib import AbstractContextManager, ExitStack
from types import FrameType

from megatron_cp.common.errors import EXIT_OF_SIGNAL
from megatron_cp.launch.process import drop_lost_output, handled, signals_to_stop_at

logger = logging.getLogger(__name__)
_SAME_KEY_PRESS = 1.0  # seconds: a terminal and a launcher may both pass on one Ctrl-C


class SignalWatch(ExitStack):
    """Stores the first signal that asked this rank to stop.

    A second SIGINT raises KeyboardInterrupt at once, without a checkpoint.
    """

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self._numbers = signals_to_stop_at() if enabled else []
        self._received = 0
        self._at = 0.0
        self.enter_context(handled(self._numbers, self._store_signal))

    def read(self) -> int:
        """Return the stored signal (0: none), and install the handlers again.

        Libraries replace them. LLVM, with which Triton compiles kernels in this process, installs handlers that restore
        the earlier ones at the first signal. Until they have, the same signal ends the process without a checkpoint,
        and ``timeout``, launchers and Slurm send a signal twice within microseconds.
        """
        for number in self._numbers:
            signal.signal(number, self._store_signal)
        return self._received

    def _store_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            drop_lost_output()
        if not self._received:
            self._received, self._at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._at > _SAME_KEY_PRESS:
            raise KeyboardInterrupt


def exit_code_of(stop: int, iteration: int) -> int:
    """Return the exit code for the signal ``stop`` (0: no signal)."""
    if not stop:
        return 0
    after = f"after iteration {iteration} and a checkpoint" if iteration else "before the first iteration"
    logger.info("%s: stopping %s", signal.Signals(stop).name, after)
    return EXIT_OF_SIGNAL[signal.Signals(stop)]


def ignore_sigterm(enabled: bool) -> AbstractContextManager[None]:
    """Ignore SIGTERM and SIGHUP while this rank reports its error.

    Launchers send them to the remaining ranks as soon as one rank has failed.
    """
    return handled((signal.SIGTERM, signal.SIGHUP) if enabled else (), signal.SIG_IGN)
