"""Process groups, communication and gradient reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.model.context_parallel import PACKS
from megatron_cp.config.setting import equals, positive, setting, size

HALF_PRECISION_GRADIENTS = equals("ddp.grad_reduce_in_fp32", False)
MAX_TIMEOUT_MINUTES = 365 * 24 * 60  # minutes; longer timeouts raise an OverflowError in torch


@dataclass
class DistributedConfig:
    use_decentralized_pg: bool = setting(False, "build process groups without megatron-core's global state")
    distributed_backend: Literal["nccl", "gloo", "staged"] | None = setting(
        None, "null: nccl on GPUs, gloo on CPUs; staged: gloo through host memory, for ranks that share a GPU; slow"
    )
    distributed_timeout_minutes: float = positive(10.0, "timeout of a message, in minutes", most=MAX_TIMEOUT_MINUTES)
    use_tp_pp_dp_mapping: bool = setting(False, "number pipeline stages before data-parallel replicas")
    attention_probe: bool = setting(True, "check each attention group with a known case before training")
    dynamic_groups_at_start: bool = setting(False, "build all groups of packs before training", when=PACKS)
    eval_context_parallel_size: int | None = setting(
        None, "ranks that share a sample in validation and test, run as packs; null: as in training"
    )


@dataclass
class DistributedDataParallelConfig:
    overlap_grad_reduce: bool = setting(False, "overlap gradient reduction with compute", translated=True)
    overlap_param_gather: bool = setting(
        False, "overlap the distributed optimizer's weight gathering with the next step", translated=True
    )
    grad_reduce_in_fp32: bool = setting(True, "reduce gradients in float32")
    average_in_collective: bool = setting(False, "average in the collective instead of dividing before it")
    check_for_nan_in_grad: bool = setting(True, "check every step for non-finite gradients", translated=True)
    bucket_size: int | None = setting(None, "elements per gradient bucket; null: megatron-core's")
    num_buckets: int | None = size(None, "number of gradient buckets, instead of bucket_size; null: by bucket_size")
    pad_buckets_for_high_nccl_busbw: bool = setting(
        False, "pad buckets to a multiple of 65536 elements, for NCCL on many ranks"
    )
    reduce_scatter_with_fp32_accumulation: bool = setting(
        False, "send gradients in their dtype and sum them in float32", when=HALF_PRECISION_GRADIENTS
    )
    param_name_patterns_for_fp32_local_accumulation: list[str] = setting(
        [],
        "parameters whose local gradients are summed in float32: name patterns, or all",
        when=HALF_PRECISION_GRADIENTS,
        translated=True,
    )
