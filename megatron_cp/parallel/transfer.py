"""Copy from host memory to a device without a host wait.

A GPU copies asynchronously only from pinned memory. Other memory is staged first, while the host waits instead of
launching kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor in pinned memory; unchanged if ``device`` is a CPU."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor on ``device``; unchanged if that is a CPU."""
    return pinned(tensor, device).to(device, non_blocking=True)
