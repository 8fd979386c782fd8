"""K rules on layer variants: positions, MLP and norms."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import ones, resized


@rule(
    "K62",
    f"{NAME.model.no_rope_freq} is a period, or has one entry per layer.",
    "megatron-core looks up each layer in the list; layers of multi-token prediction start at the first entry again.",
    broken(model=dict(no_rope_freq=[0, 1])),
)
def layers_without_positions(c: Context) -> Iterator[Finding]:
    model, every, field = c.model, c.model.no_rope_freq, NAME.model.no_rope_freq
    if isinstance(every, int) and not 1 <= every <= model.num_layers:
        message = f"every n-th layer has no rotary embedding: n must be from 1 to {model.num_layers}, got {every}"
        yield Finding(field, message, "=null")
    elif isinstance(every, list) and (len(every) != model.num_layers or not set(every) <= {0, 1}):
        message = f"must have {model.num_layers} entries: 1 for a layer without rotary embedding, else 0; got {every}"
        yield Finding(field, message, values=[resized(ones(every) or [0], model.num_layers)])


@rule(
    "K63",
    "Settings of the MLP fit its activation and its experts.",
    "megatron-core clamps only quick_gelu where kernels are fused. A router balances all tokens of a call, so "
    "chunks would change its loss. Tiles of mlp_chunk_size come after the router. An expert is not linear in its "
    "input, so probabilities on the input need one expert per token.",
    broken(model=dict(activation_func_clamp_value=7.0)),
)
def mlp_variants(c: Context) -> Iterator[Finding]:
    model = c.model
    clamped = (model.activation_func_clamp_value or 0) > 0
    if clamped and not (model.activation_func == "quick_gelu" and model.gated_linear_unit):
        fix = (
            f"{NAME.model.activation_func_clamp_value}=null, or {NAME.model.activation_func}=quick_gelu "
            f"{NAME.model.gated_linear_unit}=true"
        )
        yield Finding(NAME.model.activation_func_clamp_value, "is for gated quick_gelu only", fix)
    if model.mlp_chunks_for_training > 1 and model.num_moe_experts is not None:
        message = "chunks change the router's auxiliary loss, so models with experts need 1"
        yield Finding(NAME.model.mlp_chunks_for_training, message, "=1")
    if model.mlp_chunks_for_training > 1 and model.mlp_chunk_size is not None:
        message = f"has no effect with {NAME.model.mlp_chunk_size}, whose tiles also bound what the backward pass keeps"
        fix = f"{NAME.model.mlp_chunks_for_training}=1, or {NAME.model.mlp_chunk_size}=null"
        yield Finding(NAME.model.mlp_chunks_for_training, message, fix)
    if model.moe_apply_probs_on_input and model.num_moe_experts is not None and model.moe_router_topk != 1:
        message = f"needs one expert per token, but {NAME.model.moe_router_topk} is {model.moe_router_topk}"
        fix = (
            f"{NAME.model.moe_apply_probs_on_input}=false, or {NAME.model.moe_router_topk}=1 "
            f"{NAME.model.moe_router_pre_softmax}=true"
        )
        yield Finding(NAME.model.moe_apply_probs_on_input, message, fix)


@rule(
    "K64",
    "Queries and keys have one norm.",
    f"With {NAME.model.qk_l2_norm} megatron-core silently ignores {NAME.model.qk_layernorm}.",
    broken(model=dict(qk_l2_norm=True, qk_layernorm=True)),
)
def one_norm_of_queries(c: Context) -> Iterator[Finding]:
    if c.model.qk_l2_norm and c.model.qk_layernorm:
        fix = f"{NAME.model.qk_l2_norm}=false, or {NAME.model.qk_layernorm}=false"
        yield Finding(NAME.model.qk_l2_norm, f"cannot be combined with {NAME.model.qk_layernorm}", fix)
