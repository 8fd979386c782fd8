"""Process groups, messages, and gradients over data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.model.context_parallel import PACKS
from megatron_cp.config.setting import equals, positive, setting, size

HALF_PRECISION_GRADIENTS = equals("ddp.grad_reduce_in_fp32", False)
A_YEAR = 365 * 24 * 60  # minutes; longer ones end in an OverflowError once torch has them


@dataclass
class DistributedConfig:
    use_decentralized_pg: bool = setting(False, "groups are built by this project, without megatron-core's globals")
    distributed_backend: Literal["nccl", "gloo", "staged"] | None = setting(
        None, "null: nccl on GPUs, gloo elsewhere; staged: gloo by way of host memory, for ranks that share a GPU; slow"
    )
    distributed_timeout_minutes: float = positive(10.0, "how long a rank waits for a message", most=A_YEAR)
    use_tp_pp_dp_mapping: bool = setting(False, "pipeline stages are numbered before data-parallel replicas")
    attention_probe: bool = setting(True, "each attention group computes a known case before training")
    dynamic_groups_at_start: bool = setting(False, "groups of packs are all built before training", when=PACKS)
    eval_context_parallel_size: int | None = setting(
        None, "ranks that share a sample of validation and test, run as packs; null: as in training"
    )


@dataclass
class DistributedDataParallelConfig:
    overlap_grad_reduce: bool = setting(False, "gradients are reduced while the rest is computed", translated=True)
    overlap_param_gather: bool = setting(
        False, "the distributed optimizer's weights are gathered while the next step begins", translated=True
    )
    grad_reduce_in_fp32: bool = setting(True, "gradients are added up in float32")
    average_in_collective: bool = setting(False, "the collective averages, instead of a division before it")
    check_for_nan_in_grad: bool = setting(
        True, "look for gradients that are not finite, in every step", translated=True
    )
    bucket_size: int | None = setting(None, "elements of gradients that are reduced at once; null: megatron-core's")
    num_buckets: int | None = size(None, "number of buckets, instead of their size; null: by bucket_size")
    pad_buckets_for_high_nccl_busbw: bool = setting(
        False, "buckets are padded to a multiple of 65536 elements, for NCCL on many ranks"
    )
    reduce_scatter_with_fp32_accumulation: bool = setting(
        False, "gradients travel as they are and are added up in float32", when=HALF_PRECISION_GRADIENTS
    )
    param_name_patterns_for_fp32_local_accumulation: list[str] = setting(
        [],
        "parameters whose gradients a rank adds up in float32: patterns of names, or all",
        when=HALF_PRECISION_GRADIENTS,
        translated=True,
    )
