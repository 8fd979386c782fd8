"""The peak that model FLOPs utilization (MFU) refers to: given or measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from megatron_cp.config.names import NAME
from megatron_cp.parallel.collectives import sum_over_ranks

_SIZE = {"cuda": 8192, "cpu": 512}  # of square matrices, large enough for the device's peak rate
_CALLS = {"cuda": 10, "cpu": 1}  # per timing
_SECONDS = 0.03


@dataclass(frozen=True)
class Peak:
    """Peak of one device in TFLOP/s, and its source."""

    tflops: float
    source: Literal["given", "measured"]

    @property
    def how(self) -> str:
        """Source of the number, and how to override it."""
        if self.source == "given":
            return NAME.logger.peak_tflops_per_device
        return f"matrix products at the start; override: {NAME.logger.peak_tflops_per_device}=X"

    @property
    def name(self) -> str:
        """The MFU's name in ``metrics.jsonl``, which includes the source."""
        return f"mfu_of_{self.source}_peak"

    def mfu(self, tflops: float) -> float:
        """Return ``tflops`` (TFLOP/s of a device) as a fraction of this peak."""
        return tflops / self.tflops


def find_peak(given: float | None, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Peak:
    """Return the ``given`` peak, or the mean of measured ones. Collective.

    All ranks of ``group`` measure at the same time with matrix products of ``dtype``, since ranks on CPUs share cores
    in training too.
    """
    if given is not None:
        return Peak(given, "given")
    rate = torch.zeros(1, dtype=torch.float64, device=device)
    sum_over_ranks(rate, group)  # start all ranks together
    rate += _measure(dtype, device)
    return Peak(float(sum_over_ranks(rate, group)) / group.size(), "measured")


def _measure(dtype: torch.dtype, device: torch.device) -> float:
    """Return this device's best measured TFLOP/s; keep the random state."""
    size, calls = _SIZE[device.type], _CALLS[device.type]
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out, fastest, begin = a @ b, float("inf"), time.perf_counter()
    while time.perf_counter() - begin < _SECONDS or fastest == float("inf"):
        started = _now(device)
        for _ in range(calls):
            torch.mm(a, b, out=out)
        fastest = min(fastest, (_now(device) - started) / calls)
    return 2 * size**3 / fastest / 1e12


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
