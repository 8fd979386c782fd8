"""Floating-point operations of a step, from real tokens and causal attention.

A matrix product of [m, k] by [k, n] counts ``2 m k n`` operations, the backward pass twice the forward pass.
Recomputation (overhead) and padding do not count. Norms, rotary embeddings, softmax and activations are left out, as is
usual: they are few operations. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.hybrid_pattern import mtp_layers_of
from megatron_cp.models.layers.mamba.shape import CONV_WIDTH, MambaShape

if TYPE_CHECKING:
    import numpy as np


def training_flops(model: ModelConfig, vocab_size: int, lengths: Sequence[int]) -> float:
    """Return forward and backward operations over these documents, over all ranks.

    Attention counts the visible keys of each query: the past of the document under a causal mask, the whole document
    otherwise, limited by the layer's sliding window.

    Args:
        vocab_size: rows of the output layer.
        lengths: tokens of each document.
    """
    pairs = sum(pairs_of_samples(model, lengths).tolist())  # Python integers: may exceed int64
    return 3.0 * (sum(lengths) * flops_per_token(model, vocab_size) + pairs * flops_per_pair(model))


def flops_per_token(model: ModelConfig, vocab_size: int) -> int:
    """Return forward operations per token, without attention between tokens."""
    depths = model.mtp_num_layers or 0
    # Each MTP depth joins two hidden states, and has a layer and an output-layer product.
    outside = 2 * model.hidden_size * ((1 + depths) * vocab_size + depths * 2 * model.hidden_size)
    return outside + sum(_PER_TOKEN[part](model) for _, kind in numbered_layer_types(model) for part in kind)


def flops_per_pair(model: ModelConfig) -> int:
    """Return a layer's forward attention operations for one query-key pair."""
    return model.num_attention_heads * 2 * sum(head_dims(model))


def pairs_of_samples(model: ModelConfig, lengths: Sequence[int]) -> np.ndarray:
    """Return visible query-key pairs of each document, summed over layers: int64 [n]."""
    import numpy as np  # not above: ``validate`` imports this module, and answers sooner without numpy

    causal, window = model.attention_mask_type == "causal", tuple(model.window_size or (-1, -1))
    windows = [model.layer_has_window(number) for number, kind in numbered_layer_types(model) if "*" in kind]
    windowed, whole = windows.count(True), windows.count(False)
    tokens = np.asarray(lengths, dtype=np.int64)
    return whole * attended_pairs(tokens, causal) + windowed * attended_pairs(tokens, causal, window)


def numbered_layer_types(model: ModelConfig) -> list[tuple[int, str]]:
    """Return the number and types of each layer.

    Types: attention ``*``, MLP ``-``, experts ``E``, Mamba ``M``.
    """
    main = [*enumerate(model.layer_types, start=1)]
    if model.architecture == "hybrid":  # megatron-core restarts the numbering for MTP layers
        return [
            *main,
            *(layer for depth in mtp_layers_of(model.hybrid_layer_pattern) for layer in enumerate(depth, start=1)),
        ]
    numbers = (1 if model.mtp_use_repeated_layer else depth + 1 for depth in range(model.mtp_num_layers or 0))
    return [*main, *((number, main[-1][1]) for number in numbers)]


def head_dims(model: ModelConfig) -> tuple[int, int]:
    """Return the head dimensions of queries and keys, and of values."""
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    return channels, channels


def _projection_flops(model: ModelConfig) -> int:
    qk_dim, v_dim = head_dims(model)
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
    matrices = 3 if model.gated_linear_unit else 2
    return 2 * matrices * model.hidden_size * _ffn(model)


def _expert_flops(model: ModelConfig) -> int:
    """Count the router, the chosen experts, and shared experts with their gate."""
    matrices, latent = 3 if model.gated_linear_unit else 2, model.moe_latent_size or 0
    shared = model.moe_shared_expert_intermediate_size or 0
    scores = (model.num_moe_experts or 0) + (shared > 0 and model.moe_shared_expert_gate)
    routed = model.moe_router_topk * (model.moe_ffn_hidden_size or _ffn(model))
    # Projections into the latent dimension and back.
    outside = 2 * model.hidden_size * (matrices * shared + scores + 2 * latent)
    return outside + 2 * (latent or model.hidden_size) * matrices * routed


def _ffn(model: ModelConfig) -> int:
    return model.ffn_hidden_size or 4 * model.hidden_size


def _mamba_flops(model: ModelConfig) -> int:
    """Count projections, short convolution and the state recurrence.

    Recurrence: h = a h + (dt x) B and y = C h.
    """
    shape = MambaShape.of(model)
    projections = model.hidden_size * (sum(shape.projected) + shape.inner)
    recurrence = 5 * shape.inner * shape.state_dim
    return 2 * (projections + CONV_WIDTH * sum(shape.convolved)) + recurrence


def attended_pairs(lengths: np.ndarray, causal: bool, window: tuple[int, ...] = (-1, -1)) -> np.ndarray:
    """Return visible query-key pairs of each document.

    ``window`` is (left, right), -1 for no limit.
    """

    def one_side(limit: int) -> np.ndarray:
        reach = lengths - 1 if limit < 0 else (lengths - 1).clip(max=limit)
        return lengths * reach - reach * (reach + 1) // 2

    left, right = window
    return lengths + one_side(left) + one_side(0 if causal else right)


_PER_TOKEN = {"*": _projection_flops, "-": _mlp_flops, "E": _expert_flops, "M": _mamba_flops}
