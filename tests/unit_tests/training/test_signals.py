"""Handlers of stop signals."""

import ctypes
import os
import signal
from contextlib import closing

import pytest

from megatron_cp.training.signals import SignalWatch
from tests.ranks import run_ranks


def stopped_behind_a_library(number: int) -> list[int]:
    """Return what is read before and after a signal whose handler a library replaced."""
    with closing(SignalWatch(True)) as watch:
        ctypes.CDLL(None).signal(number, 0)  # as LLVM's handler is, until it has restored the one of Python
        before = watch.read()
        os.kill(os.getpid(), number)
        return [before, watch.read()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_library_cannot_replace_the_handlers(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Without handlers the rank would be ended by the signal."""
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")
    assert run_ranks(stopped_behind_a_library, 1, number) == [[0, number]]
