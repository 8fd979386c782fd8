"""Communication time of process groups within and between nodes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_cp.estimate.device import Device


@dataclass(frozen=True)
class Links:
    """Links of a cluster with ``per_node`` consecutive ranks on each node.

    A group is given by ``size`` and ``stride``, the rank difference between neighbouring members.
    """

    device: Device
    per_node: int

    def on_a_node(self, size: int, stride: int) -> int:
        """Return the number of group members per node."""
        return max(1, min(size, self.per_node // stride))

    def gather(self, size: int, stride: int, total: float) -> float:
        """Estimate seconds of a ring all-gather or reduce-scatter of ``total`` bytes.

        Between nodes, the bandwidth is one network card per group member on the node.
        """
        if size == 1:
            return 0.0
        device, here = self.device, self.on_a_node(size, stride)
        if here == size:
            return total * (size - 1) / size / device.intra_bandwidth + device.intra_latency * math.log2(size)
        bandwidth = min(device.intra_bandwidth, device.inter_bandwidth * here)
        return total * (size - 1) / size / bandwidth + device.inter_latency * math.log2(size)

    def exchange(self, size: int, stride: int, held: float, tensors: int = 1) -> float:
        """Estimate seconds of an all-to-all of ``tensors``.

        held: bytes of all of them that each rank sends, in equal parts to all ranks.
        """
        if size == 1:
            return 0.0
        device, here = self.device, self.on_a_node(size, stride)
        latencies = (1 + device.message_serial * (tensors - 1)) * math.log2(size)
        inside = held * (here - 1) / size / device.intra_bandwidth
        if here == size:
            return inside + device.intra_latency * latencies
        outside = held * (size - here) / size / device.inter_bandwidth
        return max(inside, outside) + device.inter_latency * latencies

    def exposed_copy(self, held: float, seconds: float) -> float:
        """Estimate the exposed seconds of a copy to or from host memory.

        held: bytes. seconds: of the work beside the copy.
        """
        bandwidth = self.device.host_bandwidth
        return max(0.0, held / bandwidth - seconds) if bandwidth else 0.0

    def hop(self, size: int, stride: int, held: float) -> float:
        """Estimate seconds of one ring step, limited by the slowest link.

        held: bytes sent by each rank to the next rank.
        """
        if size == 1:
            return 0.0
        if self.on_a_node(size, stride) == size:
            return held / self.device.intra_bandwidth + self.device.intra_latency
        return held / self.device.inter_bandwidth + self.device.inter_latency
