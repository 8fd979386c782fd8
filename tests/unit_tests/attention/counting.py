"""Gloo process group that counts the bytes it sends.

It measures a transport's traffic.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SENT: Counter = Counter()
"""Bytes that this process has handed to each other rank of a group."""


class CountingGroup(dist.ProcessGroup):
    """Gloo with the operations that the transports use on a CPU.

    All that is sent passes through a counter.
    """

    def __init__(self, gloo: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def getBackendName(self) -> str:
        return "counting"

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def send(self, tensors, to, tag):
        SENT[to] += sum(map(_bytes, tensors))
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors, source, tag):
        return self._gloo.recv(tensors, source, tag)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def counting_group(ranks: list[int]) -> dist.ProcessGroup:
    """Create a counting group. Collective over the world."""
    if not hasattr(dist.Backend, "COUNTING"):
        dist.Backend.register_backend("counting", _create, devices=["cpu"])
    return dist.new_group(ranks, backend="counting")


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> CountingGroup:
    return CountingGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)
