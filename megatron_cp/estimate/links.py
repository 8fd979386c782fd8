"""How long messages take in groups of ranks that lie on nodes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_cp.estimate.device import Device


@dataclass(frozen=True)
class Links:
    """The links of a cluster with ``per_node`` neighbouring ranks on each node.

    A group is told by its ``size`` and its ``stride``: the distance of neighbouring members in ranks.
    """

    device: Device
    per_node: int

    def on_a_node(self, size: int, stride: int) -> int:
        """Members of a group that share a node."""
        return max(1, min(size, self.per_node // stride))

    def gather(self, size: int, stride: int, total: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``total`` bytes, in a ring.

        Where the group leaves the node, as many network cards work as it has members there.
        """
        if size == 1:
            return 0.0
        device, here = self.device, self.on_a_node(size, stride)
        if here == size:
            return total * (size - 1) / size / device.intra_bandwidth + device.intra_latency * math.log2(size)
        bandwidth = min(device.intra_bandwidth, device.inter_bandwidth * here)
        return total * (size - 1) / size / bandwidth + device.inter_latency * math.log2(size)

    def exchange(self, size: int, stride: int, held: float) -> float:
        """Seconds of an all-to-all where each rank holds ``held`` bytes, of which each gets an equal part."""
        if size == 1:
            return 0.0
        device, here = self.device, self.on_a_node(size, stride)
        inside = held * (here - 1) / size / device.intra_bandwidth
        if here == size:
            return inside + device.intra_latency
        return max(inside, held * (size - here) / size / device.inter_bandwidth) + device.inter_latency

    def hop(self, size: int, stride: int, held: float) -> float:
        """Seconds of a message of ``held`` bytes from each rank to the next one of a ring, at the slowest link."""
        if size == 1:
            return 0.0
        if self.on_a_node(size, stride) == size:
            return held / self.device.intra_bandwidth + self.device.intra_latency
        return held / self.device.inter_bandwidth + self.device.inter_latency
