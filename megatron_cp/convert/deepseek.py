"""DeepSeek's families, V2 and V3: latent attention, and experts in all layers but the first ones.

Their routers differ: V2's is a softmax over all experts, of which the chosen ones' weights are taken as they are; V3's
takes sigmoids, chooses with a bias that no gradient reaches, and normalizes the chosen ones' weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.convert.problems import Problems

V2, V3 = "deepseek_v2", "deepseek_v3"
COUNTS = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
)
MAYBE_COUNTS = ("q_lora_rank",)
# Of the norms inside latent attention: those of the layers have a setting, these have it built in.
_EPSILON = 1e-6
# How many of a group's best scores are summed to choose the groups; here as many as a token has experts in each.
_SCORES_OF_A_GROUP = {V2: 1, V3: 2}
# Latent attention has neither groups of queries nor one width of its heads.
_ALWAYS = {"multi_latent_attention": True, "qk_layernorm": True, "num_query_groups": None, "kv_channels": None}


def read(family: str, values: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    """Complete a model's settings from a published ``config.json`` whose numbers are of their types."""
    for name, value in _ALWAYS.items():
        setattr(model, name, value)
    heads = values["num_attention_heads"]
    alike = values.get("num_key_value_heads") in (None, heads)
    found.unless(alike, "num_key_value_heads", values.get("num_key_value_heads"), f"one a head, {heads}, is needed")
    found.unless(values["rms_norm_eps"] == _EPSILON, "rms_norm_eps", values["rms_norm_eps"], f"{_EPSILON} is needed")
    model.q_lora_rank, model.kv_lora_rank = values.get("q_lora_rank"), values["kv_lora_rank"]
    model.qk_head_dim, model.qk_pos_emb_head_dim = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    model.v_head_dim = values["v_head_dim"]
    interleaved = family == V2 or bool(values.get("rope_interleave", True))
    found.unless(interleaved, "rope_interleave", values.get("rope_interleave"), "true is needed")
    _read_positions(values, model, found)
    _read_layers(values, model, found)
    _read_router(family, values, model, found)


def _read_positions(values: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    rope = (values.get("rope_scaling") or {}) | (values.get("rope_parameters") or {})
    stretched = model.rope_scaling or model.seq_len_interpolation_factor is not None
    found.unless(not stretched, "rope_scaling", rope, "none but YaRN is needed")
    if model.position_embedding_type != "yarn":
        return
    given = rope.get("attention_factor")
    found.unless(given is None, "rope_scaling.attention_factor", given, "mscale and mscale_all_dim are needed instead")
    rounded = model.yarn_correction_range_round_to_int
    found.unless(rounded, "rope_scaling.truncate", rope.get("truncate"), "true is needed")
    both = not rope.get("mscale_all_dim") or bool(rope.get("mscale"))
    found.unless(both, "rope_scaling.mscale", rope.get("mscale"), "a number beside mscale_all_dim is needed")


def _read_layers(values: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    dense: Any = values.get("first_k_dense_replace")
    some = type(dense) is int and 0 <= dense < model.num_layers
    message = f"fewer than the {model.num_layers} layers are needed"
    found.unless(some, "first_k_dense_replace", dense, message)
    if some and dense:
        model.moe_layer_freq = [0] * dense + [1] * (model.num_layers - dense)
    every = values.get("moe_layer_freq", 1)
    found.unless(every == 1, "moe_layer_freq", every, "experts in all layers after the first ones are needed")
    model.num_moe_experts = values["n_routed_experts"]
    model.moe_ffn_hidden_size = values["moe_intermediate_size"]
    model.moe_shared_expert_intermediate_size = values["n_shared_experts"] * values["moe_intermediate_size"]


def _read_router(family: str, values: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    experts, chosen = values["n_routed_experts"], values["num_experts_per_tok"]
    found.unless(chosen <= experts, "num_experts_per_tok", chosen, f"at most the {experts} experts are needed")
    model.moe_router_topk, model.moe_router_dtype = chosen, "fp32"
    factor: Any = values.get("routed_scaling_factor")
    number = type(factor) in (int, float) and factor > 0
    found.unless(number, "routed_scaling_factor", factor, "a number above 0 is needed")
    model.moe_router_topk_scaling_factor = float(factor) if number and factor != 1 else None
    normalized = bool(values.get("norm_topk_prob"))
    if family == V2:
        model.moe_router_pre_softmax = True
        found.unless(not normalized, "norm_topk_prob", True, "false is needed")
        method = values.get("topk_method")
        known = method in ("greedy", "group_limited_greedy")
        found.unless(known, "topk_method", method, "greedy or group_limited_greedy is needed")
        if method == "greedy":
            return
    else:
        model.moe_router_score_function, model.moe_router_enable_expert_bias = "sigmoid", True
        # One expert's weight is not normalized here, where it would always be 1.
        found.unless(normalized == (chosen > 1), "norm_topk_prob", normalized, f"{str(chosen > 1).lower()} is needed")
    groups, of_them = values.get("n_group") or 1, values.get("topk_group") or 1
    if groups == 1:
        return
    model.moe_router_num_groups, model.moe_router_group_topk = groups, of_them
    scores = _SCORES_OF_A_GROUP[family]
    fits = chosen // of_them == scores
    found.unless(fits, "topk_group", of_them, f"{scores} of the {chosen} experts in each group are needed")


def needed(model: ModelConfig) -> dict[str, Any]:
    """What settings a model has that one of these families computes, where they have any other counterpart."""
    sigmoid = model.moe_router_score_function == "sigmoid"
    return {
        "layernorm_epsilon": _EPSILON,
        "qk_layernorm": True,
        "rope_scaling": False,
        "seq_len_interpolation_factor": None,
        "window_size": None,
        "add_qkv_bias": False,
        "moe_shared_expert_gate": False,
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_pre_softmax": not sigmoid,
    }


def write(family: str, model: ModelConfig, found: Problems) -> dict[str, Any]:
    """What ``config.json`` says of attention and experts."""
    experts = [int("E" in parts) for parts in model.layer_parts]
    dense = len(experts) - sum(experts)
    first = experts == [0] * dense + [1] * sum(experts)
    message = "experts in all layers after the first ones are needed"
    found.unless(first, "model.moe_layer_freq", model.moe_layer_freq, message)
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 1
    shared = model.moe_shared_expert_intermediate_size or 0
    name, message = "model.moe_shared_expert_intermediate_size", f"a multiple of the experts' width, {width}, is needed"
    found.unless(shared > 0 and shared % width == 0, name, shared, message)
    scales = (model.yarn_mscale, model.yarn_mscale_all_dim)
    zero = None not in scales and 0 in scales and model.position_embedding_type == "yarn"
    found.unless(not zero, "model.yarn_mscale", list(scales), "two numbers other than 0, or none, are needed")
    groups, of_them = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    scores = _SCORES_OF_A_GROUP[family]
    fits = groups == 1 or model.moe_router_topk // of_them == scores
    message = f"{scores} of a token's experts in each group are needed"
    found.unless(fits, "model.moe_router_group_topk", of_them, message)
    alone = family == V3 and model.moe_router_topk == 1
    values = {
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "n_routed_experts": model.num_moe_experts,
        "n_shared_experts": shared // width,
        "moe_intermediate_size": width,
        "num_experts_per_tok": model.moe_router_topk,
        "norm_topk_prob": family == V3 and not alone,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": groups,
        "topk_group": of_them,
    }
    if family == V2:
        return values | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy", "scoring_func": "softmax"}
    return (
        values
        | {"rope_interleave": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        | {"num_nextn_predict_layers": 0}
    )
