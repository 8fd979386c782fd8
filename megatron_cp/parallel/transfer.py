"""From the host's memory to a device, without the host waiting for it.

A GPU copies by itself from pinned memory alone. What lies elsewhere is staged first, and meanwhile the host, which
should be launching kernels, waits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor``, of the host, in memory from which ``device`` copies by itself; as it is where that is a CPU."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor``, of the host, on ``device``; as it is where that is a CPU."""
    return pinned(tensor, device).to(device, non_blocking=True)
