"""Keep tensors of the forward pass in pinned host memory until the backward pass.

Copies run on one stream of their own. The two streams wait for each other's events; the host waits for neither. The
device memory of a tensor is freed in the order of the computing stream, behind a wait for the copy. So the allocator
reuses the memory at once, however far the host is ahead (``record_stream`` would keep it until the device is done).
The single stream also orders the uses of a host buffer, so that the next tensor may take it without a wait.

On a CPU nothing is copied: the bytes are counted only.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_cp.common.host_buffers import buffer_bytes


class KeptTensor:
    """A tensor that the backward pass needs again.

    Args:
        tensor: on the device; None while only the host has it.
        before: tensor that the backward pass needs after this one.
    """

    def __init__(self, tensor: Tensor, before: KeptTensor | None) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.before = before
        self.shape, self.dtype, self.device, self.nbytes = tensor.shape, tensor.dtype, tensor.device, tensor.nbytes
        self.buffer: Tensor | None = None  # pinned bytes
        self.copied: torch.cuda.Event | None = None  # the latest copy, to the host or back

    def in_buffer(self) -> Tensor:
        """Return the tensor of the host buffer."""
        assert self.buffer is not None
        return self.buffer[: self.nbytes].view(self.dtype).view(self.shape)


class HostMemory:
    """Host memory of a rank.

    peak_bytes: largest number of bytes that the host had to hold, or would have had to hold on a CPU.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._away: WeakSet[KeptTensor] = WeakSet()  # a forward pass that an error ends is forgotten
        self._leaving: KeptTensor | None = None
        self._buffers: defaultdict[int, list[Tensor]] = defaultdict(list)  # free ones, by size

    @property
    def bytes(self) -> int:
        """Bytes that the host holds now."""
        return sum(each.nbytes for each in self._away)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def send(self, tensor: Tensor, before: KeptTensor | None) -> KeptTensor:
        """Start the copy of a tensor to the host, after all launched work.

        The device keeps the tensor until the next one is sent or kept.
        """
        kept = self.keep(tensor, before)
        self._away.add(kept)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        if tensor.is_cuda:
            kept.buffer = self._buffer_of(buffer_bytes(kept.nbytes))
            self._copy(kept, kept.in_buffer(), tensor)
            self._leaving = kept
        return kept

    def keep(self, tensor: Tensor, before: KeptTensor | None) -> KeptTensor:
        """Keep a tensor on the device; :meth:`take` then brings ``before`` back."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving.copied is not None:
            torch.cuda.current_stream().wait_event(leaving.copied)
            leaving.tensor = None
        return KeptTensor(tensor, before)

    def take(self, kept: KeptTensor) -> Tensor:
        """Return a tensor on the device, and prefetch the one before."""
        tensor = self._fetch(kept)
        if kept.copied is not None:
            torch.cuda.current_stream().wait_event(kept.copied)
        if kept.before is not None:
            self._fetch(kept.before)
        return tensor

    def _fetch(self, kept: KeptTensor) -> Tensor:
        """Start the copy back, unless the device has the tensor."""
        self._away.discard(kept)
        if self._leaving is kept:
            self._leaving = None
        if kept.tensor is None:
            # Allocated for the computing stream: its earlier work may still use this memory.
            kept.tensor = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
            self._copy(kept, kept.tensor, kept.in_buffer())
        if kept.buffer is not None:
            self._buffers[len(kept.buffer)].append(kept.buffer)
            kept.buffer = None
        return kept.tensor

    def _buffer_of(self, size: int) -> Tensor:
        """Return the smallest free buffer of at least ``size`` bytes, or a new one."""
        free = [each for each, buffers in self._buffers.items() if buffers and each >= size]
        return self._buffers[min(free)].pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copy(self, kept: KeptTensor, to: Tensor, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        kept.copied = self._stream.record_event()
