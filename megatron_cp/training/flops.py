"""Floating-point operations of a training step, from real tokens and real causal attention. Pure.

Counted like this: a matrix product of an ``[m, k]`` by a ``[k, n]`` matrix is ``2 m k n`` operations, the backward pass
costs twice the forward pass, recomputation is not counted (it is overhead, not work).
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_cp.config import ModelConfig


def training_flops(model: ModelConfig, vocab_size: int, lengths: Iterable[int]) -> float:
    """Operations of forward and backward over documents of these lengths (tokens), summed over all ranks.

    ``vocab_size`` is the output layer's rows. Attention counts each query's own visible keys: its document's past
    under a causal mask, the whole document otherwise, no more than the sliding window.
    """
    lengths = list(lengths)
    tokens = sum(lengths)
    pairs = sum(_attended_pairs(model, length) for length in lengths)
    extra = 1 + (model.mtp_num_layers or 0)
    layers = model.num_layers + (model.mtp_num_layers or 0)
    per_token = layers * (_projection_flops(model) + _mlp_flops(model)) + extra * 2 * model.hidden_size * vocab_size
    qk_dim, v_dim = _head_dims(model)
    per_pair = layers * model.num_attention_heads * 2 * (qk_dim + v_dim)
    return 3.0 * (tokens * per_token + pairs * per_pair)


def _head_dims(model: ModelConfig) -> tuple[int, int]:
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    return channels, channels


def _projection_flops(model: ModelConfig) -> int:
    qk_dim, v_dim = _head_dims(model)
    heads, hidden = model.num_attention_heads, model.hidden_size
    if model.multi_latent_attention:
        rank = model.kv_lora_rank
        queries = (
            hidden * model.q_lora_rank + model.q_lora_rank * heads * qk_dim
            if model.q_lora_rank
            else hidden * heads * qk_dim
        )
        keys_values = hidden * (rank + model.qk_pos_emb_head_dim) + rank * heads * (model.qk_head_dim + v_dim)
    else:
        groups = model.num_query_groups or heads
        queries = hidden * heads * qk_dim
        keys_values = hidden * groups * (qk_dim + v_dim)
    return 2 * (queries + keys_values + heads * v_dim * hidden)


def _mlp_flops(model: ModelConfig) -> int:
    ffn = model.ffn_hidden_size or 4 * model.hidden_size
    matrices = 3 if model.gated_linear_unit else 2
    if not model.num_moe_experts:
        return 2 * matrices * model.hidden_size * ffn
    routed = model.moe_router_topk * (model.moe_ffn_hidden_size or ffn)
    return 2 * matrices * model.hidden_size * routed + 2 * model.hidden_size * model.num_moe_experts


def _attended_pairs(model: ModelConfig, length: int) -> int:
    left, right = (-1, -1) if model.window_size is None else model.window_size
    causal = model.attention_mask_type == "causal"
    left = length - 1 if left < 0 else min(left, length - 1)
    right = 0 if causal else (length - 1 if right < 0 else min(right, length - 1))
    past = length * left - left * (left + 1) // 2
    future = length * right - right * (right + 1) // 2
    return length + past + future
