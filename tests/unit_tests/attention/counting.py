"""A gloo process group that counts the bytes it sends: what a transport really puts on the wire."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

SENT: Counter = Counter()
"""Bytes that this process has handed to other ranks, by operation."""


class CountingGroup(dist.ProcessGroup):
    """Gloo with every operation the transports use passed through a counter; what a rank keeps is not counted."""

    def __init__(self, gloo: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def getBackendName(self) -> str:
        return "counting"

    def send(self, tensors, to, tag):
        SENT["send"] += sum(map(_bytes, tensors))
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors, source, tag):
        return self._gloo.recv(tensors, source, tag)

    def alltoall_base(self, received, sent, receive_sizes, send_sizes, options):
        kept = _bytes(sent) // self.size() if not send_sizes else send_sizes[self.rank()] * sent.element_size()
        SENT["all_to_all"] += _bytes(sent) - kept
        return self._gloo.alltoall_base(received, sent, receive_sizes, send_sizes, options)

    def _allgather_base(self, gathered, tensor, options):
        # A ring all-gather passes on everything but what the next rank contributed itself.
        SENT["all_gather"] += _bytes(tensor) * (self.size() - 1)
        return self._gloo._allgather_base(gathered, tensor, options)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def counting_group(ranks: list[int]) -> dist.ProcessGroup:
    """A new counting group. Collective over the world."""
    if not hasattr(dist.Backend, "COUNTING"):
        dist.Backend.register_backend("counting", _create, devices=["cpu"])
    return dist.new_group(ranks, backend="counting")


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> CountingGroup:
    return CountingGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)
