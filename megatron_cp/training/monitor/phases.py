"""Where a step's time goes: named phases, timed where the work runs, and shown in profiles.

On a CPU a phase is timed by the clock. On a GPU the phases' borders are CUDA events in the stream, read when somebody
asks (once a log interval) as far as the GPU has come, so that nothing ever waits for it: what it has still to do is in
the next reading. A phase inside another one takes its time from it, so that the phases of an interval and ``other`` add
up to the interval.
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
_MAX_UNREAD = 1024  # events that wait to be read


@dataclass(frozen=True)
class Interval:
    """What all ranks did since the last reading.

    seconds: mean over ranks and steps, by phase. peak_memory_bytes: the largest of any rank since it started.
    """

    seconds: dict[str, float]
    peak_memory_bytes: int


class Phases:
    """The phases of one rank; ``with phases("data"): ...`` is in one. ``nvtx`` also marks them for NVIDIA's tools."""

    def __init__(self, on_gpu: bool | None = None) -> None:
        self._on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
        self._running: list[Phase] = ["other"]
        self._broken: Phase | None = None
        self._seconds: dict[Phase, float] = defaultdict(float)
        self._borders: deque[tuple[Phase, Any]] = deque()  # events: which phase ended there
        self._last: Any = self._now()
        self.nvtx = False

    @property
    def current(self) -> Phase:
        """The phase that runs now; after an error the one in which it came, until another begins."""
        return self._broken or self._running[-1]

    @contextlib.contextmanager
    def __call__(self, name: Phase) -> Iterator[None]:
        if self._running[-1] in _BETWEEN_STEPS:  # evaluation's forward passes are evaluation, not training
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
            self._broken = self._broken or name  # who reports the error does so from outside of the phase
            raise
        finally:
            if self.nvtx:
                torch.cuda.nvtx.range_pop()
            self._border()
            self._running.pop()

    def read(self) -> dict[Phase, float]:
        """Seconds by phase since the last reading; on a GPU those that it has done."""
        self._border()
        self._fold()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def forget(self) -> None:
        """What went before is not to be read."""
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
    """The most that this rank has held: tensors on its GPU, or the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
