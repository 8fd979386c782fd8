"""Measure the host's work: kernels launched, Python functions called, time.

Both counts are exact on a busy machine, too. The stand-in of a kernel counts as one launch. What it computes does not
count, and its time is left out.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

_KERNELS = tuple(f"tests.doubles.te_on_cpu.{name}" for name in ("extension", "attention", "cross_entropy"))
# They allocate, and launch nothing. Views are known by their schemas.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
# The host alone runs these functions of Transformer Engine's extension.
_QUERIES = {"get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams", "get_fused_attn_backend"}


def launches_of(run: Callable[[], object]) -> Counter[str]:
    """Count the kernels that ``run`` launches, by name."""
    found: Counter[str] = Counter()

    def enter(frame: FrameType) -> None:
        if frame.f_code.co_name not in _QUERIES:
            found[frame.f_code.co_name] += 1

    with _observed(lambda frame: None, enter) as inside, _Operators(found, inside):
        run()
    return found


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """Count the Python functions that ``run`` calls, by module and name."""
    found: Counter[str] = Counter()

    def call(frame: FrameType) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("tests.doubles"):
            found[f"{module}:{frame.f_code.co_qualname}"] += 1

    with _observed(call, lambda frame: None):
        run()
    return found


def seconds_of(run: Callable[[], object]) -> float:
    """Measure this thread's processor time in ``run``, without kernels' stand-ins."""
    in_kernels = [0.0]
    with _timed_kernels(in_kernels):
        begin = time.thread_time()
        run()
        return time.thread_time() - begin - in_kernels[0]


class _Operators(TorchDispatchMode):
    """Count operators that launch a kernel."""

    def __init__(self, found: Counter[str], inside: list[FrameType]) -> None:
        super().__init__()
        self._found, self._inside = found, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not (self._inside or func.is_view or name in _ALLOCATIONS):
            self._found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _observed(call: Callable[[FrameType], None], enter: Callable[[FrameType], None]) -> Iterator[list[FrameType]]:
    """Report the calls of functions and of kernels in the body.

    The list has the kernel's frame while one runs.
    """
    inside: list[FrameType] = []

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and not inside:
            if frame.f_globals.get("__name__") in _KERNELS:
                inside.append(frame)
                enter(frame)
            else:
                call(frame)
        elif event == "return" and inside and inside[0] is frame:
            inside.clear()

    sys.setprofile(observe)
    try:
        yield inside
    finally:
        sys.setprofile(None)


@contextmanager
def _timed_kernels(seconds: list[float]) -> Iterator[None]:
    """Add the time of kernels in the body to ``seconds[0]``."""
    running: list[str] = []

    def timed(kernel: FunctionType) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if running:
                return kernel(*args, **kwargs)
            running.append(kernel.__name__)
            begin = time.thread_time()
            try:
                return kernel(*args, **kwargs)
            finally:
                seconds[0] += time.thread_time() - begin
                running.clear()

        return call

    module = sys.modules["transformer_engine_torch"]
    kernels = {
        name: timed(value)
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ in _KERNELS and not name.startswith("_")
    }
    with mock.patch.multiple(module, **kernels):
        yield
