"""Cache keys of models.

A search estimates thousands of layouts of one model and caches results by these keys. Pure.
"""

from __future__ import annotations

from typing import Any

from megatron_cp.config.model_config import ModelConfig


def model_key(model: ModelConfig) -> tuple[Any, ...]:
    """Return the settings that determine a model's operations and pipeline stages."""
    values = (
        model.architecture,
        model.hybrid_layer_pattern,
        model.num_layers,
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
        model.kv_channels,
        model.gated_linear_unit,
        model.attention_mask_type,
        model.window_size,
        model.window_attn_skip_freq,
        model.multi_latent_attention,
        model.q_lora_rank,
        model.kv_lora_rank,
        model.qk_head_dim,
        model.qk_pos_emb_head_dim,
        model.v_head_dim,
        model.num_moe_experts,
        model.moe_layer_freq,
        model.moe_router_topk,
        model.moe_ffn_hidden_size,
        model.moe_latent_size,
        model.moe_shared_expert_intermediate_size,
        model.moe_shared_expert_gate,
        model.mtp_num_layers,
        model.mtp_use_repeated_layer,
        model.mamba_state_dim,
        model.mamba_head_dim,
        model.mamba_num_groups,
        model.mamba_num_heads,
        model.pipeline_model_parallel_size,
        model.virtual_pipeline_model_parallel_size,
        model.account_for_embedding_in_pipeline_split,
        model.account_for_loss_in_pipeline_split,
        model.num_layers_in_first_pipeline_stage,
        model.num_layers_in_last_pipeline_stage,
    )
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)
