"""Named phases of a step, timed where the work runs and shown in profiles.

On a CPU phases are timed by the clock. On a GPU phase boundaries are CUDA events, read once per log interval as far as
the GPU has come. The host never waits; unfinished work counts in the next reading. A nested phase takes time from the
outer one, so the phases of an interval, including ``other``, add up to the interval.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Phase = Literal["data", "schedule", "forward_backward", "optimizer", "evaluation", "checkpoint", "other"]
_BETWEEN_STEPS: tuple[Phase, ...] = ("evaluation", "checkpoint")
PHASES: tuple[Phase, ...] = ("data", "schedule", "forward_backward", "optimizer", *_BETWEEN_STEPS, "other")
_MAX_UNREAD = 1024  # events before a read is forced


@dataclass(frozen=True)
class Interval:
    """Times and memory of all ranks since the last reading.

    seconds: mean over ranks and steps, by phase. peak_memory_bytes: the maximum of any rank since start.
    """

    seconds: dict[str, float]
    peak_memory_bytes: int


class Phases:
    """The phases of one rank; ``with phases("data"): ...`` runs inside one.

    ``nvtx`` also marks phases for NVIDIA's tools.
    """

    def __init__(self, on_gpu: bool | None = None) -> None:
        self._on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
        self._running: list[Phase] = ["other"]
        self._broken: Phase | None = None
        self._seconds: dict[Phase, float] = defaultdict(float)
        self._borders: deque[tuple[Phase, Any]] = deque()  # (phase that ended, event)
        self._last: Any = self._now()
        self.nvtx = False

    @property
    def current(self) -> Phase:
        """The current phase; after an error the phase that failed, until the next one."""
        return self._broken or self._running[-1]

    @contextlib.contextmanager
    def __call__(self, name: Phase) -> Iterator[None]:
        if self._running[-1] in _BETWEEN_STEPS:  # forward passes of an evaluation count as evaluation
            yield
            return
        self._border()
        self._broken = None
        self._running.append(name)
        if self.nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                yield
        except BaseException:
            self._broken = self._broken or name  # the error is reported outside of the phase
            raise
        finally:
            if self.nvtx:
                torch.cuda.nvtx.range_pop()
            self._border()
            self._running.pop()

    def read(self) -> dict[Phase, float]:
        """Return seconds by phase since the last reading (on a GPU: finished work)."""
        self._border()
        self._fold()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def forget(self) -> None:
        """Discard everything before now."""
        self._seconds, self._borders, self._last = defaultdict(float), deque(), self._now()

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _border(self) -> None:
        now = self._now()
        if self._on_gpu:
            self._borders.append((self._running[-1], now))
            if len(self._borders) > _MAX_UNREAD:
                self._fold()
        else:
            self._seconds[self._running[-1]] += now - self._last
            self._last = now

    def _fold(self) -> None:
        while self._borders and self._borders[0][1].query():
            name, event = self._borders.popleft()
            self._seconds[name] += self._last.elapsed_time(event) / 1e3
            self._last = event


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory.

    Tensors on a GPU, or the process's resident memory on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
