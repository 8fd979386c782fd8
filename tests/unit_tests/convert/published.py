"""Small models of every family with random weights.

Hugging Face's library makes and computes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,  # large enough that every part of the model matters
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_head_dim": 8,
    "mamba_num_heads": 16,
    "n_groups": 4,
    "time_step_min": 1e-30,  # clamped to from below there, not here
}
# Sequences are longer than the window, and all layers but the third have it.
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 20,
    "rope_local_base_freq": 100.0,
}
# Each family, with and without its optional features.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    "llama tied, scaled rope": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,  # wave lengths on both sides of every bound of the scaling
        "head_dim": 32,
    },
    "llama linear rope": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen3 yarn": {"model_type": "qwen3", "head_dim": 32, "rope_scaling": YARN},
    "qwen3 yarn, every setting": {
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_scaling": YARN
        | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
    },
    "llama yarn, its own concentration": {"model_type": "llama", "rope_scaling": YARN | {"attention_factor": 0.8}},
    "llama wide heads": {"model_type": "llama", "head_dim": 16, "num_key_value_heads": 8},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral window": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 window": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "sliding_window": 9,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "mixtral window": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 9},
    "qwen3 experts": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "deepseek 2, plain queries": {
        **LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "rope_scaling": YARN | {"beta_fast": 2.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek 2, groups of experts": {
        **LATENT,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "first_k_dense_replace": 0,
    },
    "deepseek 3": {
        **LATENT,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek 3, no groups": {
        **LATENT,
        "model_type": "deepseek_v3",
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
    },
    "gemma 3": GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma 3, output of its own, layers as listed": GEMMA3
    | {
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    },
    "nemotron h": NEMOTRON,
    "nemotron 3": {
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_num_heads": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    "nemotron 3, experts in fewer dimensions": {
        **NEMOTRON,
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 3,
        "moe_latent_size": 24,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    },
    "gpt oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "swiglu_limit": 0.5,
        "rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False},
    },
    "qwen3 experts, not normalized": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": False,
    },
}


def publish(folder: Path, variant: str, **changes: Any) -> None:
    """Write a variant with random weights.

    No weight has a value at which an error would not show.
    """
    values = SHAPE | VARIANTS[variant] | changes
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms at one, biases at zero
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif "norm" not in name and "experts" in name:
            parameter.data.normal_(std=0.15)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.1)
    model.save_pretrained(folder)


def published_losses(folder: Path, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute per-token losses ``[b, s]`` of a folder's model with transformers.

    In float32.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(tokens).logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
