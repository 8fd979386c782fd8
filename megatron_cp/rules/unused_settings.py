"""Settings that are read only where another one switches them on: they change nothing, silently, where it is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_cp.config.run_config import RunConfig
from megatron_cp.rules.base import Finding
from megatron_cp.rules.proposals import default_of, either, value_at


class _Reading(NamedTuple):
    """Fields of a section, when they are read, the words for that, and what to type where the words are no override."""

    section: str
    names: tuple[str, ...]
    are_read: Callable[[RunConfig], bool]
    switch: str
    turn_on: str = ""


_PACKS = "model.sequence_packing_scheduler=dp_balanced"
_PROFILERS = either("profiling.use_pytorch_profiler=true", "profiling.use_nsys_profiler=true")


def _rotates(config: RunConfig) -> bool:
    """Latent attention does, whatever the position embeddings."""
    return config.model.position_embedding_type in ("rope", "yarn") or config.model.multi_latent_attention


_READINGS = (
    _Reading(
        "model",
        ("rotary_base", "rotary_percent", "rotary_interleaved"),
        _rotates,
        "model.position_embedding_type=rope or yarn",
        "model.position_embedding_type=rope",
    ),
    _Reading(
        "model",
        ("rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor"),
        # What latent attention and YaRN leave out of these is an error already.
        _rotates,
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
        ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
         "yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int"),
        lambda config: config.model.position_embedding_type == "yarn",
        "model.position_embedding_type=yarn",
    ),
    _Reading(
        "model",
        ("yarn_mscale",),
        lambda config: config.model.yarn_mscale_all_dim is not None,
        "model.yarn_mscale_all_dim",
        "model.yarn_mscale_all_dim=1.0",
    ),
    _Reading(
        "model",
        ("yarn_mscale_all_dim",),
        lambda config: config.model.yarn_mscale is not None,
        "model.yarn_mscale",
        "model.yarn_mscale=1.0",
    ),
    _Reading(
        "model",
        ("glu_linear_offset", "activation_func_clamp_value"),
        lambda config: config.model.gated_linear_unit,
        "model.gated_linear_unit=true",
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
        ("mtp_loss_scaling_factor", "mtp_use_repeated_layer"),
        lambda config: bool(config.model.mtp_num_layers),
        "model.mtp_num_layers",
        "model.mtp_num_layers=1",
    ),
    _Reading(
        "model",
        ("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
         "moe_router_dtype", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
         "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_latent_size", "moe_shared_expert_intermediate_size",
         "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
         "expert_tensor_parallel_size"),
        lambda config: config.model.num_moe_experts is not None,
        "model.num_moe_experts",
        "model.num_moe_experts=8",
    ),
    _Reading(
        "model",
        ("moe_layer_freq",),
        # A hybrid model's is an error already.
        lambda config: config.model.num_moe_experts is not None or config.model.architecture == "hybrid",
        "model.num_moe_experts",
        "model.num_moe_experts=8",
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
        "model.moe_router_group_topk=1",
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
        "model.moe_router_load_balancing_type=none",
    ),
    _Reading(
        "model",
        ("moe_shared_expert_gate",),
        lambda config: config.model.moe_shared_expert_intermediate_size is not None,
        "model.moe_shared_expert_intermediate_size",
        "model.moe_shared_expert_intermediate_size=1024",
    ),
    _Reading(
        "model",
        ("max_seqlen_per_dp_cp_rank",),
        lambda config: config.runs_packs,
        "model.sequence_packing_scheduler or dist.eval_context_parallel_size",
        _PACKS,
    ),
    _Reading(
        "model",
        ("min_dynamic_context_parallel_size", "dynamic_context_parallel_calibration_iters"),
        lambda config: config.model.dynamic_context_parallel,
        "model.dynamic_context_parallel=true",
    ),
    _Reading(
        "model",
        ("microbatch_group_size_per_vp_stage", "overlap_p2p_comm"),
        lambda config: config.model.virtual_pipeline_model_parallel_size is not None,
        "model.virtual_pipeline_model_parallel_size",
        "model.virtual_pipeline_model_parallel_size=2",
    ),
    _Reading(
        "dist",
        ("dynamic_groups_at_start",),
        lambda config: config.runs_packs,
        "model.sequence_packing_scheduler or dist.eval_context_parallel_size",
        _PACKS,
    ),
    _Reading(
        "train",
        ("manual_gc_interval",),
        lambda config: config.train.manual_gc,
        "train.manual_gc=true",
    ),
    _Reading(
        "validation",
        ("eval_global_batch_size", "eval_micro_batch_size"),
        lambda config: config.validation.eval_iters != 0,
        "validation.eval_iters",
        "validation.eval_iters=10",
    ),
    _Reading(
        "scheduler",
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        lambda config: config.scheduler.lr_decay_style == "WSD",
        "scheduler.lr_decay_style=WSD",
    ),
    # Their own start and end replace it; a zero is a value, too.
    _Reading(
        "optimizer",
        ("weight_decay",),
        lambda config: None in (config.scheduler.start_weight_decay, config.scheduler.end_weight_decay),
        "scheduler.start_weight_decay=null or scheduler.end_weight_decay=null",
        either("scheduler.start_weight_decay=null", "scheduler.end_weight_decay=null"),
    ),
    _Reading(
        "optimizer",
        ("sgd_momentum",),
        lambda config: config.optimizer.optimizer == "sgd",
        "optimizer.optimizer=sgd",
    ),
    _Reading(
        "optimizer",
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda config: config.optimizer.optimizer == "adam",
        "optimizer.optimizer=adam",
    ),
    _Reading(
        "profiling",
        ("profile_step_start", "profile_step_end"),
        lambda config: config.profiling.use_pytorch_profiler or config.profiling.use_nsys_profiler,
        "profiling.use_pytorch_profiler=true or profiling.use_nsys_profiler=true",
        _PROFILERS,
    ),
    _Reading(
        "profiling",
        ("profile_ranks",),
        lambda config: (
            config.profiling.use_pytorch_profiler or config.profiling.use_nsys_profiler or config.profiling.nvtx_ranges
        ),
        "profiling.use_pytorch_profiler=true or profiling.use_nsys_profiler=true or profiling.nvtx_ranges=true",
        either(_PROFILERS, "profiling.nvtx_ranges=true"),
    ),
    _Reading(
        "profiling",
        ("pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
        lambda config: config.profiling.use_pytorch_profiler,
        "profiling.use_pytorch_profiler=true",
    ),
    _Reading(
        "dataset",
        ("mock_masked_fraction", "mock_num_samples"),
        lambda config: config.dataset.kind in ("mock", "mock_documents"),
        "dataset.data_path=null",
    ),
    _Reading(
        "dataset",
        ("split",),
        lambda config: config.dataset.divides,
        "dataset.valid_data_path=null dataset.test_data_path=null",
    ),
    _Reading(
        "dataset",
        ("text_key", "prompt_key", "response_key"),
        lambda config: config.dataset.kind == "jsonl",
        "dataset.kind=jsonl",
    ),
    _Reading(
        "tokenizer",
        ("tokenizer_model", "add_bos"),
        lambda config: config.tokenizer.tokenizer_type == "HuggingFaceTokenizer",
        "tokenizer.tokenizer_type=HuggingFaceTokenizer",
    ),
    # Not by the kind of data: a recipe's mock_lengths are there for who has no documents yet.
    _Reading(
        "dataset",
        ("mock_lengths", "too_long"),
        lambda config: config.model.sequence_packing_scheduler is not None,
        "model.sequence_packing_scheduler",
        _PACKS,
    ),
)  # fmt: skip


def unread(config: RunConfig) -> Iterator[Finding]:
    """A warning for each setting of a finalized configuration that was given a value and is read by nothing."""
    said, defaults = set(), RunConfig()
    for section, names, are_read, switch, turn_on in _READINGS:
        for name in [] if are_read(config) else names:
            field = f"{section}.{name}"
            value = value_at(config, field)
            if field not in said and value != value_at(defaults, field) and value != _unset(config, section, name):
                said.add(field)
                fix = either(default_of(field), turn_on or switch)
                yield Finding(field, f"has no effect: it is read with {switch} only", fix, "warning")


def _unset(config: RunConfig, section: str, name: str) -> Any:
    """What the setting is where nobody gives it: its default, which others may decide."""
    default = value_at(RunConfig(), f"{section}.{name}")
    without = replace(config, **{section: replace(getattr(config, section), **{name: default})})
    return value_at(without.finalize(), f"{section}.{name}")
