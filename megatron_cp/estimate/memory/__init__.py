"""Peak memory of a layout, by kind. Pure: no torch."""

from megatron_cp.estimate.memory.model import memory_estimate

__all__ = ["memory_estimate"]
