"""Work of one rank for a microbatch: kernel and message times. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megatron_cp.estimate.device import Device
from megatron_cp.estimate.links import Links


def item_size(gemm: str) -> int:
    """Return the bytes of an activation beside matrix products of a format."""
    return 4 if gemm == "fp32" else 2


class Work(NamedTuple):
    """Seconds of a pass by kind, and the number of launched kernels."""

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
        return Work(  # not a loop: the hot path of a search
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
    """Forward and backward work of one microbatch.

    again: recomputed part of ``forward``.
    weights: parameters on the rank, without routed experts.
    expert_weights: parameters of routed experts on the rank.
    """

    forward: Work
    backward: Work
    again: Work = NOTHING
    weights: float = 0.0
    expert_weights: float = 0.0


@dataclass(frozen=True)
class Rank:
    """Device, group sizes and microbatch of one rank.

    tokens: tokens of the microbatch on a context parallel rank.
    pairs: visible query-key pairs per layer, summed over context parallel ranks.
    square: query-key pairs without a mask, summed over context parallel ranks.
    longest: tokens of the longest document.
    split: ranks that share the tokens outside attention and MLP (sequence parallelism).
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
    split: int

    @property
    def item(self) -> int:
        """Bytes of an activation."""
        return item_size(self.gemm)

    def moved(self, elements: float) -> float:
        """Estimate seconds of kernels that read or write ``elements`` in total."""
        return elements * self.item / self.device.memory_bandwidth

    def products(self, *shapes: tuple[float, float, float], count: float = 1, backward: bool = False) -> Work:
        """Estimate matrix products of [m, k] by [k, n], each ``count`` times.

        backward: estimate the input-gradient and weight-gradient products of each shape instead.

        A product takes ``hypot(compute, memory)`` seconds: the longer time dominates, with imperfect overlap when both
        are equal. Formats below 16 bits also need a cast of the operands.
        """
        device, bits16 = self.device, self.gemm in ("bf16", "fp32")
        item = self.item if bits16 else 1
        rate, bandwidth = device.matmul_rate(self.gemm), device.memory_bandwidth
        seconds = cast = 0.0
        for m, k, n in shapes:
            operations = 2 * m * k * n / rate
            if backward:  # input gradient; weight gradient, accumulated in float32
                seconds += math.hypot(operations, (item * (m * n + k * n) + self.item * m * k) / bandwidth)
                seconds += math.hypot(operations, (item * (m * k + m * n) + 8 * k * n) / bandwidth)
            else:
                seconds += math.hypot(operations, (item * (m * k + k * n) + self.item * m * n) / bandwidth)
            if not bits16:
                cast += 2 * self.item * m * (n if backward else k)
        products = (2 if backward else 1) * len(shapes) * count
        kernels = products * (1 if bits16 else 2)
        return Work(count * seconds, 0.0, count * cast / bandwidth, kernels=kernels)

    def of_tensor_parallel(self, width: float, gathers: int) -> Work:
        """Estimate ``gathers`` all-gathers or reduce-scatters of [tokens, width]."""
        if self.tp == 1:
            return NOTHING
        one = self.links.gather(self.tp, 1, self.tokens * width * self.item)
        return Work(tp=gathers * one * (1 - self.device.overlap["tp"]), kernels=gathers)
