"""How long this rank works in a step, without waiting for the others at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class WorkClock:
    """``seconds`` from the first microbatch of the last step until this rank's gradients were complete."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def __call__(self, core_config: Any) -> Iterator[None]:
        """Time the schedule that runs inside: it ends by calling ``finalize_model_grads_func``, where ranks meet."""
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
