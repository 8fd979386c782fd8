"""Leave out needless copies of gradients, parameters and activations on CPUs.

There each costs as much as a part of the optimizer's step. On a GPU fused kernels or NCCL do not make them, so there
nothing is replaced. The numbers stay the same bits, but for the order of sums over more than two ranks. Test of each:
tests/unit_tests/mcore/test_in_place.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron_cp.mcore.shards import Exchange, gather_shards, sum_shards


def apply() -> None:
    """Install the patches, on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    _shards_are_exchanged_in_place()
    _gradients_are_scaled_in_place()
    _parameters_are_not_copied_onto_themselves()


def _shards_are_exchanged_in_place() -> None:
    """Gather and sum shards of parameters, gradients and activations where they lie.

    distributed/param_and_grad_buffer.py:515, :712.
    tensor_parallel/mappings.py:96, :146, :186.
    tensor_parallel/layers.py:571, :617, :650.
    gloo copies the whole buffer, even for a group of one rank. The first module coalesces asynchronous calls, for which
    torch takes its own collectives only: those stay gloo's, but for a group of one rank.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel import layers, mappings

    for name, ours in (("dist_all_gather_func", gather_shards), ("dist_reduce_scatter_func", sum_shards)):
        setattr(buffers, name, _in_place(getattr(buffers, name), ours, coalesces=True))
        setattr(mappings, name, _in_place(getattr(mappings, name), ours))
        setattr(layers, name, _in_place(getattr(layers, name), ours))


def _in_place(
    upstream: Callable[..., Any], ours: Callable[[Tensor, Tensor, Any], Iterator[None]], coalesces: bool = False
) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def exchange(output: Tensor, given: Tensor, group: Any = None, async_op: bool = False, **reduction: Any) -> Any:
        summed = reduction.get("op", ReduceOp.SUM) == ReduceOp.SUM
        if group is None or not summed or (async_op and coalesces and group.size() > 1):
            return upstream(output, given, group=group, async_op=async_op, **reduction)
        started = Exchange(ours(output, given, group))
        return started if async_op else started.wait()

    return exchange


def _gradients_are_scaled_in_place() -> None:
    """Clip gradients without a copy of each.

    optimizer/clip_grads.py:190 (utils.py:1337), without Transformer Engine and apex. Upstream makes the scaled gradient
    and copies it back.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_scale

    if clip_grads.multi_tensor_scale_impl is not local_multi_tensor_scale:
        return

    @functools.wraps(local_multi_tensor_scale)
    def scale_into(chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], scale: float) -> None:
        for source, target in zip(*tensor_lists, strict=True):
            torch.mul(source, scale, out=target)

    clip_grads.multi_tensor_scale_impl = scale_into


def _parameters_are_not_copied_onto_themselves() -> None:
    """Skip the copy of float32 parameters from the optimizer to the model.

    optimizer/distrib_optimizer.py:2876. The optimizer's float32 parameters are parts of the model's: the same memory.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._copy_main_params_to_model_params

    @functools.wraps(original)
    def copy_unless_shared(self: Any) -> None:
        if not _shares_all_parameters(self):
            original(self)

    DistributedOptimizer._copy_main_params_to_model_params = copy_unless_shared


def _shares_all_parameters(optimizer: Any) -> bool:
    if optimizer.is_stub_optimizer or optimizer.ddp_config.use_megatron_fsdp:
        return False
    if any(optimizer.shard_fp32_from_float16_groups):
        return False
    for parts, whole in zip(optimizer.shard_fp32_groups, optimizer.model_fp32_groups, strict=True):
        for part, parameter in zip(parts, whole, strict=True):
            index, _, bucket = optimizer.model_param_gbuf_map[parameter]
            buffer = optimizer.buffers[index].buckets[bucket].param_data
            if part.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                return False
    return True
