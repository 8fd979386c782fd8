"""The peak that model FLOPs utilization (MFU) is a fraction of: given, or measured by matrix products at the start."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from megatron_cp.config.names import NAME
from megatron_cp.parallel.collectives import sum_over_ranks

_SIZE = {"cuda": 8192, "cpu": 512}  # of square matrices: large enough for the device's best rate
_CALLS = {"cuda": 10, "cpu": 1}  # between two readings of the clock
_SECONDS = 0.03


@dataclass(frozen=True)
class Peak:
    """The most that one device can do, in TFLOP/s, and where the number comes from."""

    tflops: float
    source: Literal["given", "measured"]

    @property
    def how(self) -> str:
        """Where the number comes from, and how to get another one."""
        if self.source == "given":
            return NAME.logger.peak_tflops_per_device
        return f"matrix products at the start; override: {NAME.logger.peak_tflops_per_device}=X"

    @property
    def name(self) -> str:
        """The MFU's name in ``metrics.jsonl``, which says what it is a fraction of."""
        return f"mfu_of_{self.source}_peak"

    def mfu(self, tflops: float) -> float:
        """The fraction of this peak that ``tflops`` (TFLOP/s of a device) is."""
        return tflops / self.tflops


def find_peak(given: float | None, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Peak:
    """Return the ``given`` peak, or measure one with matrix products of ``dtype``. Collective over ``group``.

    All ranks measure at the same time, since ranks on CPUs share cores as they do in training; the mean counts.
    """
    if given is not None:
        return Peak(given, "given")
    rate = torch.zeros(1, dtype=torch.float64, device=device)
    sum_over_ranks(rate, group)  # all begin together
    rate += _measure(dtype, device)
    return Peak(float(sum_over_ranks(rate, group)) / group.size(), "measured")


def _measure(dtype: torch.dtype, device: torch.device) -> float:
    """TFLOP/s of this device, the best of several readings. Leaves the random state as it is."""
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
