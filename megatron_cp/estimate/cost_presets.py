"""Named cost models: published ones, and ones derived from the time model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from megatron_cp.attention.transports.registry import ALL_TO_ALL, RING
from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import override
from megatron_cp.config.recipes import load_recipe
from megatron_cp.dynamic_cp.cost import PRESETS, CostModel
from megatron_cp.estimate.device import load_device
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.prices import prices
from megatron_cp.parallel.layout import layout_of

_LONGEST = 131072
_8B, _70B = "llama3_8b_pretrain_config", "llama3_70b_pretrain_config"
# The sizes of Qwen3-30B-A3B.
_MOE_3B: Mapping[str, Any] = {
    NAME.model.num_layers: 48,
    NAME.model.hidden_size: 2048,
    NAME.model.num_query_groups: 4,
    NAME.model.kv_channels: 128,
    NAME.model.num_moe_experts: 128,
    NAME.model.moe_router_topk: 8,
    NAME.model.moe_ffn_hidden_size: 768,
    NAME.model.expert_model_parallel_size: 8,
}
_TP8: Mapping[str, Any] = {NAME.model.tensor_model_parallel_size: 8}
# Device, recipe and changed settings.
_DERIVED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "h100_70b_tp8": ("h100", _70B, _TP8),
    "h200_8b": ("h200", _8B, {}),
    "h200_70b_tp8": ("h200", _70B, _TP8),
    "h200_moe3b": ("h200", _8B, _MOE_3B),
    "a100_8b": ("a100", _8B, {}),
    "a100_moe3b": ("a100", _8B, _MOE_3B),
    "h100_8b_a2a": ("h100", _8B, {NAME.model.cp_comm_type: ALL_TO_ALL.name}),
}
_PLAIN: Mapping[str, Any] = {
    NAME.model.pipeline_model_parallel_size: 1,
    NAME.model.virtual_pipeline_model_parallel_size: None,
    NAME.model.context_parallel_size: 1,
    NAME.model.cp_comm_type: RING.name,
    NAME.model.recompute_granularity: None,
}
NAMES = sorted([*PRESETS, *_DERIVED])


@cache
def cost_preset(name: str) -> CostModel:
    """Return a cost model by name; one of :data:`NAMES`."""
    if name in PRESETS:
        return PRESETS[name]
    gpu, recipe, changes = _DERIVED[name]
    config, device = load_recipe(recipe, [override(*each) for each in {**_PLAIN, **changes}.items()]), load_device(gpu)
    layout = layout_of(config.model, config.dist, device.gpus_per_node)
    assert config.model.vocab_size is not None
    job = Job(config.model, config.optimizer, config.ddp, layout, 1, layout.dp, config.model.vocab_size)
    return prices(job, _LONGEST, device)
