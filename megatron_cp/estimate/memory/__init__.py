"""Peak memory of a layout, by kind. Pure: no torch."""

from megatron_cp.estimate.memory.model import memory_estimate, stage_estimate
from megatron_cp.estimate.memory.platform import CPU, GPU, Platform

__all__ = ["CPU", "GPU", "Platform", "memory_estimate", "stage_estimate"]
