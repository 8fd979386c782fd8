"""Measure a rank's own work in a step, without waiting for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class WorkClock:
    """``seconds`` from a step's first microbatch to this rank's complete gradients."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def __call__(self, core_config: Any) -> Iterator[None]:
        """Time the schedule that runs inside.

        It ends with ``finalize_model_grads_func``, the first call that waits for other ranks.
        """
        finalize, begin = core_config.finalize_model_grads_func, time.perf_counter()

        def finalize_and_stop(*args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            self.seconds = time.perf_counter() - begin
            return finalize(*args, **kwargs)

        core_config.finalize_model_grads_func = finalize_and_stop
        try:
            yield
        finally:
            core_config.finalize_model_grads_func = finalize
