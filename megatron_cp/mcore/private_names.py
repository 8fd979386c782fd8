"""Private names of megatron-core that other packages need: the one place where they are read and set."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu as initialize_affine_weight_cpu
from megatron.core.transformer.moe.router import TopKRouter
from torch.distributed import ProcessGroup

__all__ = ["initialize_affine_weight_cpu", "keep_expert_bias_in_float32", "name_tensor_parallel_group"]


def keep_expert_bias_in_float32(router: TopKRouter) -> None:
    """Undo the cast of a router's expert bias to the model's 16 bits."""
    router._maintain_float32_expert_bias()


def name_tensor_parallel_group(projection: Any, group: ProcessGroup) -> None:
    """Give a linear of Transformer Engine's that is whole on each rank its group; nothing for other linears.

    Without a group it asks the global state which rank saves it.
    """
    if getattr(projection, "_tp_group", projection) is None:
        projection._tp_group = group
