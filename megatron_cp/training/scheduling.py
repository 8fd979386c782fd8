"""From a configuration to schedules: what keeps step, what a microbatch costs, and the call of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cp.config import ModelConfig, RunConfig
from megatron_cp.dynamic_cp.cost import DEVICES, CostModel, ModelShape, cost_model
from megatron_cp.dynamic_cp.fixed import schedule_fixed_cp
from megatron_cp.dynamic_cp.scheduler import schedule
from megatron_cp.dynamic_cp.types import Schedule
from megatron_cp.parallel.layout import RankLayout
from megatron_cp.training.flops import training_flops


def keeps_step(model: ModelConfig) -> bool:
    """Whether all ranks run equally many microbatches: pipeline stages and experts meet in each of them."""
    tp = model.tensor_model_parallel_size
    shared_experts = model.expert_model_parallel_size > 1 or (model.expert_tensor_parallel_size or tp) > tp
    return model.pipeline_model_parallel_size > 1 or shared_experts


def sequence_parallel_size(model: ModelConfig) -> int:
    """Tensor-parallel ranks that split a rank's tokens once more."""
    return model.tensor_model_parallel_size if model.sequence_parallel else 1


def make_schedule(config: RunConfig, layout: RankLayout, lengths: Sequence[int], cost: CostModel) -> Schedule:
    """The schedule of one global batch, as configured; the same on every rank. Raises ValueError for what cannot be."""
    model = config.model
    assert model.max_seqlen_per_dp_cp_rank is not None
    in_step: dict[str, Any] = what_keeps_step(model, layout)
    common: dict[str, Any] = {
        "cost": cost,
        "microbatch_multiple": in_step.pop("microbatch_multiple"),
        "sequence_parallel_size": sequence_parallel_size(model),
    }
    num_ranks = layout.dp * layout.cp
    if not model.dynamic_context_parallel:
        return schedule_fixed_cp(lengths, num_ranks, model.max_seqlen_per_dp_cp_rank, cp_size=layout.cp, **common)
    return schedule(
        lengths,
        num_ranks,
        model.max_seqlen_per_dp_cp_rank,
        min_cp_size=model.min_dynamic_context_parallel_size,
        **in_step,
        **common,
    )


def what_keeps_step(model: ModelConfig, layout: RankLayout) -> dict[str, Any]:
    """``microbatch_multiple``, ``sync_ranks`` and ``pipeline_size`` of a run, as the scheduler knows them."""
    multiple = 1
    if model.virtual_pipeline_model_parallel_size is not None:
        multiple = model.microbatch_group_size_per_vp_stage or model.pipeline_model_parallel_size
    return {"microbatch_multiple": multiple, "sync_ranks": sync_ranks(layout), "pipeline_size": layout.pp}


def sync_ranks(layout: RankLayout) -> int:
    """Neighbouring ranks of a domain that meet in every microbatch, because they share experts."""
    domain = layout.dp * layout.cp
    together = -(-layout.ep * layout.etp // layout.tp)
    return together if domain % together == 0 else domain


def model_cost(config: RunConfig) -> CostModel:
    """The cost model of a configuration on this machine, before anything was measured."""
    model = config.model
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    device = next((rates for key, rates in DEVICES.items() if key in name), DEVICES["H100"])
    per_token = training_flops(model, model.vocab_size or 32768, [1]) / 6
    kinds = [model.cp_comm_type] if isinstance(model.cp_comm_type, str) else model.cp_comm_type
    shape = ModelShape(
        layers=model.num_layers,
        attention_heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=model.kv_channels or model.hidden_size // model.num_attention_heads,
        active_parameters=per_token,
    )
    return cost_model(
        shape,
        device,
        tensor_parallel_size=model.tensor_model_parallel_size,
        transport="a2a" if set(kinds) == {"a2a"} else "p2p",
    )
