"""Profile chosen steps on chosen ranks: PyTorch profiler traces or Nsight marks.

A profile shows phases (:mod:`megatron_cp.training.monitor.phases`) and iterations by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_cp.config.run_config import ProfilingConfig
from megatron_cp.training.monitor.phases import Phases

logger = logging.getLogger(__name__)


class Profiler:
    """Profiles iterations ``profile_step_start + 1`` to ``profile_step_end``.

    Only ranks in ``profile_ranks`` profile. Each step runs in :meth:`step`. Traces go to
    ``profile/rank<r>_iterations_<first>-<last>.json.gz`` in the run's ``folder``, for ui.perfetto.dev or
    chrome://tracing. A trace that cannot be written causes a warning only.
    """

    def __init__(self, config: ProfilingConfig, folder: Path, rank: int, phases: Phases) -> None:
        chosen = rank in config.profile_ranks
        self._config = config
        self._with_torch = chosen and config.use_pytorch_profiler
        self._with_nsys = chosen and config.use_nsys_profiler
        self._folder, self._rank, self._phases = folder / "profile", rank, phases
        self._steps = range(config.profile_step_start, config.profile_step_end)
        self._trace: profile | None = None
        self._first = self._last = 0  # iterations of the current profile; 0: none
        phases.nvtx = chosen and config.nvtx_ranges

    @contextmanager
    def step(self, done: int) -> Iterator[None]:
        """Run the step after ``done`` iterations inside, profiled if configured."""
        if done not in self._steps or not (self._with_torch or self._with_nsys):
            yield
            return
        if not self._first:
            self._start(done + 1)
        self._last = done + 1
        if self._with_nsys:
            torch.cuda.nvtx.range_push(f"iteration {done + 1}")
        with record_function(f"iteration {done + 1}"):
            yield
        if self._with_nsys:
            torch.cuda.nvtx.range_pop()
        if done + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Stop and write the current profile, if any."""
        if not self._first:
            return
        name = f"rank{self._rank}_iterations_{self._first}-{self._last}.json.gz"
        self._first = 0
        if self._with_nsys:
            torch.cuda.cudart().cudaProfilerStop()
            self._phases.nvtx = self._config.nvtx_ranges
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.stop()
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("the profile %s could not be written: %s", path, error)
        else:
            logger.info("wrote the profile %s; view it with 'megatron-cp profile' or ui.perfetto.dev", path)

    def _start(self, first: int) -> None:
        self._first = first
        if self._with_nsys:
            torch.cuda.cudart().cudaProfilerStart()
            self._phases.nvtx = True
        if self._with_torch:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._trace = profile(
                activities=activities,
                record_shapes=self._config.pytorch_profiler_collect_shapes,
                with_stack=self._config.pytorch_profiler_collect_callstack,
                acc_events=True,  # one cycle only; otherwise torch warns
            )
            self._trace.start()
