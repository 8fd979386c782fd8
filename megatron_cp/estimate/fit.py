"""Fit a device's constants to measured step times.

A few scalars are fitted, each with a prior centred on the current value. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.estimate.device import Device

# Fitted speeds: matrix products, attention, memory, host, intra-node links, inter-node links.
SCALARS = ("matmul", "attention", "memory", "host", "intra", "inter")
_WIDTHS = {"matmul": 0.3, "attention": 0.5, "memory": 0.5, "host": 1.0, "intra": 0.7, "inter": 0.7}
NOISE = 0.03  # relative standard deviation of a measured time
_ROUNDS = 12


@dataclass(frozen=True)
class Fit:
    """A fitted device.

    ratios: predicted over measured seconds of each fitted job.
    speeds: factor of each scalar, in the order of :data:`SCALARS`.
    """

    device: Device
    ratios: tuple[float, ...]
    speeds: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        return sum(abs(ratio - 1) for ratio in self.ratios) / len(self.ratios)


def scaled(device: Device, speeds: Sequence[float]) -> Device:
    """Multiply each speed of :data:`SCALARS` by a factor.

    speeds: one factor per scalar, in the order of :data:`SCALARS`.
    """
    matmul, attention, memory, host, intra, inter = speeds
    return replace(
        device,
        matmul_efficiency={key: value * matmul for key, value in device.matmul_efficiency.items()},
        attention_flops=(device.attention_flops[0] * attention, device.attention_flops[1] * attention),
        memory_bandwidth=device.memory_bandwidth * memory,
        launch_seconds=device.launch_seconds / host,
        step_seconds=device.step_seconds / host,
        intra_bandwidth=device.intra_bandwidth * intra,
        intra_latency=device.intra_latency / intra,
        inter_bandwidth=device.inter_bandwidth * inter,
        inter_latency=device.inter_latency / inter,
    )


def fit_device(device: Device, predict: Callable[[Device], Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Fit the device's scalars to measured step times, robustly.

    Each scalar has a log-normal prior centred on 1, so scalars without evidence stay unchanged. Residuals above three
    times the noise have linear (Huber) loss, which limits the effect of an outlier.

    Args:
        predict: seconds per step of each job on a device.
        seconds: measured seconds per step of each job.
    """

    def residuals(logs: np.ndarray) -> np.ndarray:
        predicted = predict(scaled(device, np.exp(logs).tolist()))
        return np.log(np.asarray(predicted) / np.asarray(seconds, dtype=float))

    logs, step = np.zeros(len(SCALARS)), 1e-3
    prior = np.array([1 / _WIDTHS[name] ** 2 for name in SCALARS])
    for _ in range(_ROUNDS):
        now = residuals(logs)
        slopes = np.stack([(residuals(logs + step * unit) - now) / step for unit in np.eye(len(SCALARS))], axis=1)
        weights = 1 / NOISE**2 / np.maximum(1, np.abs(now) / (3 * NOISE))
        normal = slopes.T @ (weights[:, None] * slopes) + np.diag(prior)
        change = np.linalg.solve(normal, -(slopes.T @ (weights * now) + prior * logs))
        logs = logs + change * min(1.0, 0.5 / max(1e-9, float(np.abs(change).max())))
        if np.abs(change).max() < 1e-4:
            break
    speeds = tuple(np.exp(logs).tolist())
    return Fit(scaled(device, speeds), tuple(math.exp(each) for each in residuals(logs)), speeds)
