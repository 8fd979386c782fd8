"""Leave out needless copies of whole gradients and parameters on CPUs.

There each costs as much as a part of the optimizer's step. On a GPU fused kernels or NCCL do not make them, so there
nothing is replaced. The numbers stay the same bits. Test of each: tests/unit_tests/mcore/test_in_place.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def apply() -> None:
    """Install the patches, on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    _a_single_rank_exchanges_nothing()
    _gradients_are_scaled_in_place()
    _parameters_are_not_copied_onto_themselves()


def _a_single_rank_exchanges_nothing() -> None:
    """Skip reduce-scatter and all-gather of a group of one rank.

    distributed/param_and_grad_buffer.py:515, :712. Gloo copies the whole buffer, for a result that lies in it already.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, _skipped_if_alone(getattr(buffers, name)))


def _skipped_if_alone(exchange: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(exchange)
    def unless_alone(output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        alone = group is not None and group.size() == 1 and output.data_ptr() == given.data_ptr()
        return None if alone else exchange(output, given, *args, **kwargs)

    return unless_alone


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
