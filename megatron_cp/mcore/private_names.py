"""Private names of megatron-core and torch that other packages read or set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import recompute, tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.distributed import ProcessGroup

initialize_affine_weight_cpu = layers._initialize_affine_weight_cpu


@contextmanager
def recomputing_layers_with(checkpoint: Callable[..., Any]) -> Iterator[None]:
    """Replace ``tensor_parallel.checkpoint`` for the layers that a block recomputes."""
    recompute.tensor_parallel = SimpleNamespace(checkpoint=checkpoint, random=tensor_parallel.random)
    try:
        yield
    finally:
        recompute.tensor_parallel = tensor_parallel


def in_backward_pass() -> bool:
    """Return whether autograd runs: a forward pass in it is a recomputation.

    megatron-core's ``is_checkpointing`` stays true after an error in a recomputed layer.
    """
    return torch._C._current_graph_task_id() != -1


def rotary_scale(attention: Attention) -> float:
    """Return the concentration factor of an attention's rotary embedding."""
    return attention._yarn_concentration_factor


def keep_expert_bias_in_float32(router: TopKRouter) -> None:
    """Undo the cast of a router's expert bias to 16 bits."""
    router._maintain_float32_expert_bias()


def name_tensor_parallel_group(projection: Any, group: ProcessGroup) -> None:
    """Set the group of a replicated Transformer Engine linear; ignore other linears.

    Without a group, saving asks the global state which rank saves the linear.
    """
    if getattr(projection, "_tp_group", group) is None:
        projection._tp_group = group


def main_part(optimizer: MegatronOptimizer, parameter: Tensor) -> tuple[Tensor, int] | None:
    """Return this rank's float32 slice of a 16-bit parameter, and its first element."""
    main = getattr(parameter, "main_param", None)
    if main is None or not getattr(parameter, "main_param_sharded", False):
        return None if main is None else (main, 0)
    divided = (each for each in optimizer.chained_optimizers if isinstance(each, DistributedOptimizer))
    owner = next(each for each in divided if parameter in each.model_param_gbuf_map)
    return main, owner._get_model_param_range_map(parameter)["param"].start
