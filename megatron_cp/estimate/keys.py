"""By which models are told apart where results are kept: a search asks for thousands of layouts of one model. Pure."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from megatron_cp.config.model_config import ModelConfig

_FIELDS = attrgetter(
    "architecture",
    "hybrid_layer_pattern",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "gated_linear_unit",
    "attention_mask_type",
    "window_size",
    "window_attn_skip_freq",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def model_key(model: ModelConfig) -> tuple[Any, ...]:
    """What the operations and the pipeline stages of a model depend on."""
    return tuple(tuple(value) if isinstance(value, list) else value for value in _FIELDS(model))
