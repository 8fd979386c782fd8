"""Fit a device's constants to measured step times: a few scalars, each held near what it was. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.estimate.device import Device
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.time import time_estimate

# What is fitted: speed of matrix products, of attention, of memory, of the host, of links inside a node and of others.
SCALARS = ("matmul", "attention", "memory", "host", "intra", "inter")
_WIDTHS = {"matmul": 0.3, "attention": 0.5, "memory": 0.5, "host": 1.0, "intra": 0.7, "inter": 0.7}
NOISE = 0.03  # of a measured time, as a share of it
_ROUNDS = 12


@dataclass(frozen=True)
class Fit:
    """A device, and predicted over measured seconds of each job that it was fitted to."""

    device: Device
    ratios: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        return sum(abs(ratio - 1) for ratio in self.ratios) / len(self.ratios)


def scaled(device: Device, speeds: Sequence[float]) -> Device:
    """The device with each of :data:`SCALARS` so many times as fast."""
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


def fit_device(device: Device, jobs: Sequence[Job], seconds: Sequence[float], gpus_per_node: int | None = None) -> Fit:
    """The device whose predictions come closest to measured seconds, robustly.

    Each scalar has a normal prior in the logarithm around 1, so that a few runs move only what they say something
    about. Residuals beyond three times the noise count linearly (Huber), so that one bad run does not decide.
    """

    def residuals(logs: np.ndarray) -> np.ndarray:
        changed = scaled(device, np.exp(logs).tolist())
        predicted = [time_estimate(job, changed, gpus_per_node).seconds for job in jobs]
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
    return Fit(scaled(device, np.exp(logs).tolist()), tuple(math.exp(each) for each in residuals(logs)))
