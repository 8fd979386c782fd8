"""Settings that are read only where another one switches them on: they change nothing, silently, where it is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_cp.config import RunConfig
from megatron_cp.rules.rule import Finding, default_of, value_at


class _Reading(NamedTuple):
    """Fields of a section, when they are read, and the words for that."""

    section: str
    names: tuple[str, ...]
    are_read: Callable[[RunConfig], bool]
    switch: str


_READINGS = (
    _Reading(
        "model",
        ("rotary_base", "rotary_percent", "rotary_interleaved", "rope_scaling", "rope_scaling_factor",
         "seq_len_interpolation_factor"),
        # Latent attention rotates whatever the position embeddings. What it leaves out of these is an error already.
        lambda config: config.model.position_embedding_type == "rope" or config.model.multi_latent_attention,
        "model.position_embedding_type=rope",
    ),
    _Reading(
        "model",
        ("rope_scaling_factor",),
        lambda config: config.model.rope_scaling or config.model.multi_latent_attention,
        "model.rope_scaling=true",
    ),
    _Reading(
        "model",
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        lambda config: config.model.multi_latent_attention,
        "model.multi_latent_attention=true",
    ),
    _Reading(
        "model",
        ("num_query_groups", "kv_channels"),
        lambda config: not config.model.multi_latent_attention,
        "model.multi_latent_attention=false",
    ),
    _Reading(
        "model",
        ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
        lambda config: config.model.architecture == "hybrid",
        "model.architecture=hybrid",
    ),
    _Reading(
        "model",
        ("mtp_loss_scaling_factor",),
        lambda config: bool(config.model.mtp_num_layers),
        "model.mtp_num_layers",
    ),
    _Reading(
        "model",
        ("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
         "moe_router_dtype", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
         "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_shared_expert_intermediate_size", "moe_layer_freq",
         "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
        lambda config: config.model.num_moe_experts is not None,
        "model.num_moe_experts",
    ),
    _Reading(
        "model",
        ("moe_router_bias_update_rate",),
        lambda config: config.model.moe_router_enable_expert_bias,
        "model.moe_router_enable_expert_bias=true",
    ),
    _Reading(
        "model",
        ("moe_router_num_groups",),
        lambda config: config.model.moe_router_group_topk is not None,
        "model.moe_router_group_topk",
    ),
    _Reading(
        "model",
        ("moe_router_pre_softmax",),
        lambda config: config.model.moe_router_score_function == "softmax",
        "model.moe_router_score_function=softmax",
    ),
    _Reading(
        "model",
        ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
         "moe_router_num_groups", "moe_router_group_topk"),
        lambda config: config.model.moe_router_load_balancing_type != "sinkhorn",
        "model.moe_router_load_balancing_type=aux_loss or none",
    ),
    _Reading(
        "model",
        ("moe_shared_expert_gate",),
        lambda config: config.model.moe_shared_expert_intermediate_size is not None,
        "model.moe_shared_expert_intermediate_size",
    ),
    _Reading(
        "model",
        ("max_seqlen_per_dp_cp_rank",),
        lambda config: config.runs_packs,
        "model.sequence_packing_scheduler or dist.eval_context_parallel_size",
    ),
    _Reading(
        "model",
        ("min_dynamic_context_parallel_size",),
        lambda config: config.model.dynamic_context_parallel,
        "model.dynamic_context_parallel=true",
    ),
    # Not by the kind of data: a recipe's mock_lengths are there for who has no documents yet.
    _Reading(
        "dataset",
        ("mock_lengths", "too_long"),
        lambda config: config.model.sequence_packing_scheduler is not None,
        "model.sequence_packing_scheduler",
    ),
)  # fmt: skip


def unread(config: RunConfig) -> Iterator[Finding]:
    """A warning for each setting of a finalized configuration that was given a value and is read by nothing."""
    said = set()
    for section, names, are_read, switch in _READINGS:
        for name in [] if are_read(config) else names:
            field = f"{section}.{name}"
            if field not in said and value_at(config, field) != _unset(config, section, name):
                said.add(field)
                fix = f"{default_of(field)}, or {switch}"
                yield Finding(field, f"has no effect: it is read with {switch} only", fix, "warning")


def _unset(config: RunConfig, section: str, name: str) -> Any:
    """What the setting is where nobody gives it: its default, which others may decide."""
    default = value_at(RunConfig(), f"{section}.{name}")
    without = replace(config, **{section: replace(getattr(config, section), **{name: default})})
    return value_at(without.finalize(), f"{section}.{name}")
