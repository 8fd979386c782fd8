"""Private names of megatron-core that other packages need: the one place where they are read and set."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.router import TopKRouter
from torch.distributed import ProcessGroup

initialize_affine_weight_cpu = layers._initialize_affine_weight_cpu


def keep_expert_bias_in_float32(router: TopKRouter) -> None:
    """Undo the cast of a router's expert bias to the model's 16 bits."""
    router._maintain_float32_expert_bias()


def name_tensor_parallel_group(projection: Any, group: ProcessGroup) -> None:
    """Give a linear of Transformer Engine's that is whole on each rank its group; nothing for other linears.

    Without a group it asks the global state which rank saves it.
    """
    if getattr(projection, "_tp_group", group) is None:
        projection._tp_group = group
