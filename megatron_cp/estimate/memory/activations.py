"""What the forward pass keeps for the backward pass, in bytes for each token of a rank, by kind. Pure."""

from __future__ import annotations

from collections import Counter

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.models.layers.mamba.shape import MambaShape

Kept = Counter[str]  # bytes for each token, by kind


def kept_by_layer(model: ModelConfig, parts: str, item: int) -> Kept:
    """Of a layer of these parts, on a GPU with Transformer Engine's layers. ``item``: bytes of an element."""
    if model.recompute_granularity == "full":
        return Counter(inputs=_residual(model, item))
    recomputed = model.recompute_modules or [] if model.recompute_granularity == "selective" else []
    kept: Kept = Counter()
    for part in parts:
        kept.update(_OF_PART[part](model, item, recomputed))
    return kept


def _residual(model: ModelConfig, item: int) -> float:
    """Bytes a token of the residual stream on this rank."""
    parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return model.hidden_size * item / parts


def _around(model: ModelConfig, item: int, recomputed: list[str]) -> Kept:
    """The input of a norm and its output, and what dropout and sandwich norms keep."""
    stream = _residual(model, item)
    kept = stream * (1 if "layernorm" in recomputed else 2)
    if model.sandwich_norm:
        kept += stream
    if model.hidden_dropout:
        kept += stream / item
    return Counter(norms=kept)


def _attention(model: ModelConfig, item: int, recomputed: list[str]) -> Kept:
    tp, heads = model.tensor_model_parallel_size, model.num_attention_heads
    if model.multi_latent_attention:
        queries = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
        keys, values = queries, heads * model.v_head_dim
        latent = 2 * ((model.q_lora_rank or 0) + model.kv_lora_rank + model.qk_pos_emb_head_dim)
        outputs = values
    else:
        channels = model.kv_channels or model.hidden_size // heads
        queries = outputs = heads * channels
        keys = values = model.kv_heads * channels
        latent = 0
    kept = item * (latent + (queries + keys + values + outputs) / tp)
    if model.qk_layernorm:
        kept += item * (queries + keys) / tp
    if "core_attn" not in recomputed:
        kept += 4 * heads / tp  # the softmax's log-sum-exp
    return _around(model, item, recomputed) + Counter(attention=kept)


def _mlp(model: ModelConfig, item: int, recomputed: list[str]) -> Kept:
    if "mlp" in recomputed:
        return Counter(norms=_residual(model, item) * 2)
    width = (model.ffn_hidden_size or 4 * model.hidden_size) / model.tensor_model_parallel_size
    inner = 2 if model.gated_linear_unit else 1
    return _around(model, item, recomputed) + Counter(mlp=item * width * (inner + 1))


def _experts(model: ModelConfig, item: int, recomputed: list[str]) -> Kept:
    kept = _around(model, item, recomputed)
    if "moe" in recomputed:
        return kept
    hidden, topk = model.hidden_size, model.moe_router_topk
    parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * hidden
    inner = 2 if model.gated_linear_unit else 1
    inside = model.moe_latent_size or hidden
    experts = topk / parts * item * (inside + width * (inner + 1))
    shared = model.moe_shared_expert_intermediate_size or 0
    experts += item * shared * (inner + 1) / model.tensor_model_parallel_size
    router = 4 * (model.num_moe_experts or 0) * 2 / parts
    return kept + Counter(experts=experts, router=router)


def _mamba(model: ModelConfig, item: int, recomputed: list[str]) -> Kept:
    shape = MambaShape.of(model)
    kept = item * (sum(shape.projected) + 3 * shape.inner) / model.tensor_model_parallel_size
    return _around(model, item, recomputed) + Counter(mamba=kept)


_OF_PART = {"*": _attention, "-": _mlp, "E": _experts, "M": _mamba}
