"""Private names of megatron-core that other packages read or set."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.router import TopKRouter
from torch.distributed import ProcessGroup

initialize_affine_weight_cpu = layers._initialize_affine_weight_cpu


def keep_expert_bias_in_float32(router: TopKRouter) -> None:
    """Undo the cast of a router's expert bias to 16 bits."""
    router._maintain_float32_expert_bias()


def name_tensor_parallel_group(projection: Any, group: ProcessGroup) -> None:
    """Set the group of a replicated Transformer Engine linear; ignore other linears.

    Without a group, saving asks the global state which rank saves the linear.
    """
    if getattr(projection, "_tp_group", group) is None:
        projection._tp_group = group
