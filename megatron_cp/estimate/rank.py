"""What one rank works on in a microbatch, and what its kernels and messages take. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megatron_cp.estimate.device import Device
from megatron_cp.estimate.links import Links

ITEM = 2  # bytes of an activation in bf16


class Work(NamedTuple):
    """Seconds of a pass by kind, and how many kernels it launches."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    kernels: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self[:-1])

    def plus(self, other: Work, times: float = 1.0) -> Work:
        return Work(  # written out, because a search calls it most of the time
            self.matmul + times * other.matmul,
            self.attention + times * other.attention,
            self.elementwise + times * other.elementwise,
            self.tp + times * other.tp,
            self.cp + times * other.cp,
            self.ep + times * other.ep,
            self.kernels + times * other.kernels,
        )


NOTHING = Work()


@dataclass(frozen=True)
class Passes:
    """``again`` is what recomputation repeats of ``forward``; ``weights`` the rank's, of experts if ``expert``."""

    forward: Work
    backward: Work
    again: Work = NOTHING
    weights: float = 0.0
    expert_weights: float = 0.0


@dataclass(frozen=True)
class Rank:
    """What one rank works on in a microbatch, and with what.

    tokens: of the microbatch on a context parallel rank. pairs: of a query and a key that it sees, of all context
    parallel ranks, and ``square``: as if each saw all of its document. longest: tokens of the longest document.
    """

    device: Device
    links: Links
    gemm: str
    tokens: float
    pairs: float
    square: float
    longest: float
    tp: int
    cp: int
    ep: int
    etp: int
    levels: tuple[int, ...] | None
    split: int  # ranks that divide the tokens outside of attention and MLP

    def moved(self, elements: float) -> float:
        """Seconds of kernels that read or write so many elements in all."""
        return elements * ITEM / self.device.memory_bandwidth

    def products(self, *shapes: tuple[float, float, float], count: float = 1, backward: bool = False) -> Work:
        """Matrix products of [m, k] by [k, n], each ``count`` times; with ``backward`` the two that follow from each.

        A product takes its operations at the rate of large products and its bytes at the rate of memory, of which it
        hides the shorter one, though not where both are as long. Formats of less than 16 bits have to be made first.
        """
        device, bits16 = self.device, self.gemm in ("bf16", "fp32")
        item = ITEM if bits16 else 1
        rate, bandwidth = device.matmul_rate(self.gemm), device.memory_bandwidth
        seconds = cast = 0.0
        for m, k, n in shapes:
            operations = 2 * m * k * n / rate
            if backward:  # of the input, and of the weight, whose gradient is added up in float32
                seconds += math.hypot(operations, (item * (m * n + k * n) + ITEM * m * k) / bandwidth)
                seconds += math.hypot(operations, (item * (m * k + m * n) + 8 * k * n) / bandwidth)
            else:
                seconds += math.hypot(operations, (item * (m * k + k * n) + ITEM * m * n) / bandwidth)
            if not bits16:
                cast += 2 * ITEM * m * (n if backward else k)
        products = (2 if backward else 1) * len(shapes) * count
        kernels = products * (1 if bits16 else 2)
        return Work(count * seconds, 0.0, count * cast / bandwidth, kernels=kernels)

    def of_tensor_parallel(self, width: float, gathers: int) -> Work:
        """So many all-gathers and reduce-scatters of all tokens, ``width`` elements each."""
        if self.tp == 1:
            return NOTHING
        one = self.links.gather(self.tp, 1, self.tokens * width * ITEM)
        return Work(tp=gathers * one * (1 - self.device.overlap["tp"]), kernels=gathers)
