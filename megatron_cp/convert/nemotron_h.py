"""Nemotron-H's family: hybrids of Mamba-2, attention without positions, MLPs and experts, up to Nemotron 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.convert.problems import Problems, is_count, is_positive
from megatron_cp.models.hybrid_pattern import layers_of
from megatron_cp.models.layers.mamba_shape import CONV_WIDTH, MambaShape

MODEL_TYPE = "nemotron_h"
_LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
# Each count, and what it is called here.
_COUNTS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "ssm_state_size": "mamba_state_dim",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_num_heads": "mamba_num_heads",
    "n_groups": "mamba_num_groups",
}
_COUNTS_OF_EXPERTS = {
    "n_routed_experts": "num_moe_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "num_experts_per_tok": "moe_router_topk",
}
# What has one value in all models of the family that have a counterpart.
_GIVEN: dict[str, Any] = {
    "conv_kernel": CONV_WIDTH,
    "use_conv_bias": True,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,  # the norm inside Mamba layers has it built in
    "use_bias": False,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "residual_in_fp32": False,
}
# The same of a model here; experts beside it.
_NEEDED: dict[str, Any] = {
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "activation_func": "squared_relu",
    "gated_linear_unit": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "attention_mask_type": "causal",
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
    "multi_latent_attention": False,
    "share_embeddings_and_output_weights": False,
}
_NEEDED_OF_EXPERTS: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_gate": False,
    "moe_router_pre_softmax": False,
}
# By as many scores the groups are chosen; here as many as a token has experts in each.
_SCORES_OF_A_GROUP = 2


def count_names(values: Mapping[str, Any]) -> list[str]:
    """The settings that count something in a published model of these settings."""
    kinds = values.get("layers_block_type")
    return [*_COUNTS, *(_COUNTS_OF_EXPERTS if isinstance(kinds, list) and "moe" in kinds else ())]


def read(values: Mapping[str, Any]) -> ModelConfig:
    """The settings of a published model.

    Raises:
        ConfigError: it computes something that this package's models do not; lists all of it.
    """
    found = Problems("the value that the model was published with")
    kinds: Any = values.get("layers_block_type")
    known = isinstance(kinds, list) and len(kinds) > 0 and set(map(str, kinds)) <= _LETTERS.keys()
    found.unless(known, "layers_block_type", kinds, f"a list of {', '.join(_LETTERS)} is needed")
    pattern = "".join(_LETTERS[kind] for kind in kinds) if known else "M"
    counts = _COUNTS | (_COUNTS_OF_EXPERTS if "E" in pattern else {})
    for name in counts:
        found.unless(is_count(values.get(name)), name, values.get(name), "a whole number of at least 1 is needed")
    std = values.get("initializer_range")
    found.unless(is_positive(std), "initializer_range", std, "a number above 0 is needed")
    found.tell()
    found = Problems()
    for name, value in _GIVEN.items():
        found.unless(values.get(name, value) == value, name, values.get(name), f"{value} is needed")
    for name in ("quantization_config", "compression_config"):
        found.unless(not values.get(name), name, values.get(name), "there is no counterpart")
    limit: Any = values.get("time_step_limit", (0.0, math.inf))
    found.unless(list(limit) == [0.0, math.inf], "time_step_limit", limit, "none is needed")
    model = ModelConfig(
        architecture="hybrid",
        hybrid_layer_pattern=pattern,
        num_layers=len(pattern),
        **{here: values[name] for name, here in counts.items()},
        **_NEEDED,
        init_method_std=values["initializer_range"],
    )
    if "E" in pattern:
        _read_router(values, model, found)
    found.tell()
    return model


def _read_router(values: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    for name, value in _NEEDED_OF_EXPERTS.items():
        setattr(model, name, value)
    model.moe_router_dtype = "fp32"
    latent: Any = values.get("moe_latent_size")
    found.unless(latent is None or is_count(latent), "moe_latent_size", latent, "at least 1, or null, is needed")
    model.moe_latent_size = latent
    experts, chosen = values["n_routed_experts"], values["num_experts_per_tok"]
    found.unless(chosen <= experts, "num_experts_per_tok", chosen, f"at most the {experts} experts are needed")
    # One expert's weight is not normalized here, where it would always be 1.
    normalized, needed = bool(values.get("norm_topk_prob")), chosen > 1
    found.unless(normalized == needed, "norm_topk_prob", normalized, f"{str(needed).lower()} is needed")
    factor: Any = values.get("routed_scaling_factor")
    found.unless(is_positive(factor), "routed_scaling_factor", factor, "a number above 0 is needed")
    model.moe_router_topk_scaling_factor = float(factor) if is_positive(factor) and factor != 1 else None
    shared = values.get("n_shared_experts")
    found.unless(shared == 1, "n_shared_experts", shared, "1 is needed")
    groups, of_them = values.get("n_group") or 1, values.get("topk_group") or 1
    if groups == 1:
        return
    model.moe_router_num_groups, model.moe_router_group_topk = groups, of_them
    fits = chosen // of_them == _SCORES_OF_A_GROUP
    found.unless(fits, "topk_group", of_them, f"{_SCORES_OF_A_GROUP} of the {chosen} experts in each group are needed")


def write(model: ModelConfig, rows: int) -> dict[str, Any]:
    """``config.json`` of a hybrid model, but for its name.

    Raises:
        ConfigError: this family does not compute what it does; lists all that stands in the way.
    """
    found, pattern = Problems(), layers_of(model.hybrid_layer_pattern)
    needed = _NEEDED | (_NEEDED_OF_EXPERTS if "E" in pattern else {})
    for name, value in needed.items():
        found.unless(getattr(model, name) == value, f"model.{name}", getattr(model, name), f"{value} is needed")
    counts = _COUNTS | (_COUNTS_OF_EXPERTS if "E" in pattern else {})
    values: dict[str, Any] = {name: getattr(model, here) for name, here in counts.items()}
    values |= {"mamba_num_heads": MambaShape.of(model).heads, "num_key_value_heads": model.kv_heads}
    values |= _GIVEN | {
        "vocab_size": rows,
        "num_hidden_layers": len(pattern),
        "layers_block_type": [kind for letter in pattern for kind, mark in _LETTERS.items() if mark == letter],
        "initializer_range": model.init_method_std,
        "attention_dropout": 0.0,
        # What Hugging Face's library clamps time steps to, from below; nothing does here.
        "time_step_min": 1e-30,
        "num_nextn_predict_layers": 0,
    }
    if "E" in pattern:
        values |= _written_router(model, found)
    found.tell()
    return values


def _written_router(model: ModelConfig, found: Problems) -> dict[str, Any]:
    shared, balancing = model.moe_shared_expert_intermediate_size, model.moe_router_load_balancing_type
    found.unless(bool(shared), "model.moe_shared_expert_intermediate_size", shared, "a shared expert is needed")
    message = "experts that are chosen by their own scores are needed"
    found.unless(balancing != "sinkhorn", "model.moe_router_load_balancing_type", balancing, message)
    groups, of_them = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    fits = groups == 1 or model.moe_router_topk // of_them == _SCORES_OF_A_GROUP
    message = f"{_SCORES_OF_A_GROUP} of a token's experts in each group are needed"
    found.unless(fits, "model.moe_router_group_topk", of_them, message)
    return {
        "moe_intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_latent_size": model.moe_latent_size,
        "n_shared_experts": 1,
        "norm_topk_prob": model.moe_router_topk > 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": groups,
        "topk_group": of_them,
    }
