"""What a model's settings are called on either side: Hugging Face's ``config.json`` and :class:`ModelConfig`.

Both directions are exact or refused: nothing that would change what the model computes is left out or rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.convert import deepseek, nemotron_h
from megatron_cp.convert.problems import Problems, is_count, is_positive
from megatron_cp.models.yarn import concentration

# The only Llama 3 scaling that megatron-core knows; its factor is free.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
)
_MAYBE_COUNTS = ("num_key_value_heads", "head_dim")
# The largest padding unit that a published vocabulary is held against: any padding would be part of the softmax.
_VOCABULARY_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Experts:
    """What a family calls its experts: the module, the two halves of the first matrix (the gate's is "" where there is
    none) and the second matrix, and the settings of how many there are and how wide."""

    module: str
    gate: str
    up: str
    down: str
    count: str
    width: str


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of Hugging Face's.

    Which of these features its models have, always or where the settings say so: biases of the query, key and value
    projections, normalized queries and keys, a sliding window, experts, latent attention; or Mamba layers among others.
    """

    model_type: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    window: bool = False
    experts: Experts | None = None
    latent: bool = False
    hybrid: bool = False

    @property
    def may_have_window(self) -> bool:
        """Whether a model of this family may have a sliding window; Qwen's config decides by use_sliding_window."""
        return self.window or ((self.qkv_bias or self.qk_norm) and not self.latent)


_MIXTRAL = Experts("block_sparse_moe", "w1", "w3", "w2", "num_local_experts", "intermediate_size")
_QWEN3 = Experts("mlp", "gate_proj", "up_proj", "down_proj", "num_experts", "moe_intermediate_size")
_NEMOTRON = Experts("mixer", "", "up_proj", "down_proj", "n_routed_experts", "moe_intermediate_size")
_DEEPSEEK = Experts("mlp", "gate_proj", "up_proj", "down_proj", "n_routed_experts", "moe_intermediate_size")

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM", window=True),
        Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
        Family("qwen3", "Qwen3ForCausalLM", qk_norm=True),
        Family("mixtral", "MixtralForCausalLM", window=True, experts=_MIXTRAL),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, experts=_QWEN3),
        Family(deepseek.V2, "DeepseekV2ForCausalLM", qk_norm=True, experts=_DEEPSEEK, latent=True),
        Family(deepseek.V3, "DeepseekV3ForCausalLM", qk_norm=True, experts=_DEEPSEEK, latent=True),
        Family(nemotron_h.MODEL_TYPE, "NemotronHForCausalLM", experts=_NEMOTRON, hybrid=True),
    )
}


def model_from_hf(values: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """The family and the settings of a published model.

    Args:
        values: its ``config.json``, with Hugging Face's own defaults filled in.

    Raises:
        ConfigError: it computes something that this package's models do not; lists all of it.
    """
    family = FAMILIES[values["model_type"]]
    if family.hybrid:
        model = nemotron_h.read(values)
        model.make_vocab_size_divisible_by = _padding_unit(values)
        return family, model
    _check_types(family, values)
    found = Problems()
    found.unless(values["hidden_act"] in ("silu", "swish"), "hidden_act", values["hidden_act"], "silu is needed")
    for name in ("attention_bias", "mlp_bias", "quantization_config", "compression_config"):
        found.unless(not values.get(name), name, values.get(name), "there is no counterpart")
    heads = values["num_attention_heads"]
    model = ModelConfig(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_hidden_size=values["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=values.get("num_key_value_heads") or heads,
        kv_channels=values.get("head_dim") or values["hidden_size"] // heads,
        max_position_embeddings=values["max_position_embeddings"],
        vocab_size=values["vocab_size"],
        make_vocab_size_divisible_by=_padding_unit(values),
        share_embeddings_and_output_weights=bool(values["tie_word_embeddings"]),
        layernorm_epsilon=values["rms_norm_eps"],
        init_method_std=values["initializer_range"],
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
    )
    _read_positions(values, model, found)
    _read_window(family, values, model, found)
    if family.latent:
        deepseek.read(family.model_type, values, model, found)
    elif family.experts is not None:
        _read_experts(family, values, model, found)
    found.tell()
    return family, model


def hf_from_model(model: ModelConfig, rows: int) -> tuple[Family, dict[str, Any]]:
    """The family that computes what a model does, and its ``config.json``, in the form that all versions read.

    Args:
        rows: of the embedding, padding included: they are part of the softmax.

    Raises:
        ConfigError: no family computes that; lists all that stands in the way.
    """
    if model.architecture == "hybrid":
        hybrid = FAMILIES[nemotron_h.MODEL_TYPE]
        named = {"architectures": [hybrid.architecture], "model_type": hybrid.model_type}
        return hybrid, named | nemotron_h.write(model, rows) | {"max_position_embeddings": _positions(model)}
    found = Problems()
    plain = {
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_mask_type": "causal",
        "softmax_scale": None,
        "softmax_type": "vanilla",
        "window_attn_skip_freq": None,
    }
    if model.multi_latent_attention:
        plain |= deepseek.needed(model)
    elif model.num_moe_experts is not None:
        plain |= {"moe_shared_expert_intermediate_size": None, "moe_router_score_function": "softmax"}
        plain |= {"moe_router_topk_scaling_factor": None, "moe_layer_freq": 1, "moe_router_group_topk": None}
        plain |= {"moe_router_enable_expert_bias": False}
    if model.num_moe_experts is not None:
        plain |= {"moe_latent_size": None}
    for name, value in plain.items():
        found.unless(getattr(model, name) == value, f"model.{name}", getattr(model, name), f"{value} is needed")
    kind = model.position_embedding_type
    found.unless(kind in ("rope", "yarn"), "model.position_embedding_type", kind, "rope or yarn is needed")
    family = _family_of(model)
    if family is None:
        features = ["add_qkv_bias", "qk_layernorm", "window_size", "num_moe_experts", "moe_router_pre_softmax"]
        features.append("multi_latent_attention")
        has = ", ".join(f"{name}={getattr(model, name)}" for name in features)
        found.unless(False, "model", None, f"no family has all of {has}")
    both = model.rope_scaling and model.seq_len_interpolation_factor is not None
    found.unless(not both, "model.rope_scaling", True, "not also seq_len_interpolation_factor is needed")
    balancing = model.moe_router_load_balancing_type
    found.unless(
        model.num_moe_experts is None or balancing != "sinkhorn",
        "model.moe_router_load_balancing_type",
        balancing,
        "experts that are chosen by their own scores are needed",
    )
    window = model.window_size
    found.unless(window is None or (window[0] >= 0 and window[1] == 0), "model.window_size", window, "[n, 0] is needed")
    latent = deepseek.write(family.model_type, model, found) if family is not None and family.latent else {}
    found.tell()
    assert family is not None
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": _positions(model),
        "vocab_size": rows,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "rms_norm_eps": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "hidden_act": "silu",
        "rope_theta": int(model.rotary_base),  # as megatron-core takes it
        "rope_scaling": _rope_scaling(model),
        "attention_dropout": 0.0,
    }
    if family.latent:
        del values["head_dim"]
        return family, values | latent | {"attention_bias": False}
    if family.model_type not in ("qwen2", "mistral", "mixtral"):
        values["attention_bias"] = False
    if family.window:
        values["sliding_window"] = window[0] + 1 if window else None  # here the token itself counts
    elif family.may_have_window:  # some versions apply a window whatever use_sliding_window says
        width = window[0] + 1 if window else None
        values |= {"use_sliding_window": bool(window), "max_window_layers": 0, "sliding_window": width}
    if family.experts is not None:
        values |= {
            family.experts.count: model.num_moe_experts,
            family.experts.width: model.moe_ffn_hidden_size or model.ffn_hidden_size,
            "num_experts_per_tok": model.moe_router_topk,
            "router_aux_loss_coef": model.moe_aux_loss_coeff,
        }
        if family.model_type == "qwen3_moe":
            values |= {"norm_topk_prob": not model.moe_router_pre_softmax, "decoder_sparse_step": 1}
    return family, values


def count_names(family: Family, values: Mapping[str, Any]) -> list[str]:
    """The settings of a published ``config.json`` that count something in its family's models."""
    if family.hybrid:
        return nemotron_h.count_names(values)
    counts = [*_COUNTS, *(name for name in _MAYBE_COUNTS if values.get(name) is not None)]
    if family.latent:
        counts += [*deepseek.COUNTS, *(name for name in deepseek.MAYBE_COUNTS if values.get(name) is not None)]
    elif family.experts is not None:
        counts += [family.experts.count, family.experts.width, "num_experts_per_tok"]
    return counts


def _check_types(family: Family, values: Mapping[str, Any]) -> None:
    """What the rest computes with: not every version of Hugging Face's library looks."""
    found = Problems("the value that the model was published with")
    for name in count_names(family, values):
        found.unless(is_count(values.get(name)), name, values.get(name), "a whole number of at least 1 is needed")
    for name in ("rms_norm_eps", "initializer_range"):
        found.unless(is_positive(values.get(name)), name, values.get(name), "a number above 0 is needed")
    found.tell()


def _positions(model: ModelConfig) -> int | None:
    """The longest text that is declared: the training length where that is longer, but with YaRN (rule B13)."""
    if model.yarn_length is not None or model.seq_length is None:
        return model.yarn_length or model.max_position_embeddings
    return max(model.max_position_embeddings or 0, model.seq_length)


def _padding_unit(values: Mapping[str, Any]) -> int:
    return next(n for n in _VOCABULARY_UNITS if values["vocab_size"] % n == 0)


def _family_of(model: ModelConfig) -> Family | None:
    sigmoid = model.moe_router_score_function == "sigmoid"
    for family in (each for each in FAMILIES.values() if not each.hybrid):
        fits = (
            family.qkv_bias == model.add_qkv_bias
            and family.qk_norm == model.qk_layernorm
            and family.latent == model.multi_latent_attention
            and (not family.latent or (family.model_type == deepseek.V3) == sigmoid)
            and (family.experts is not None) == (model.num_moe_experts is not None)
            and (family.may_have_window or model.window_size is None)
            # A softmax over all experts whose chosen part is not normalized again: Mixtral's always is.
            and (not model.moe_router_pre_softmax or family.model_type != "mixtral" or model.num_moe_experts is None)
        )
        if fits:
            return family
    return None


def _read_positions(values: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    rope: dict[str, Any] = {"rope_theta": values.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        given = values.get(name) or {}
        plain = isinstance(given, dict) and not any(isinstance(value, dict) for value in given.values())
        found.unless(plain, name, given, "one set of them for all layers is needed")
        rope |= given if plain else {}
    base = model.rotary_base if rope["rope_theta"] is None else rope["rope_theta"]
    whole = is_positive(base) and base == int(base)
    found.unless(whole, "rope_theta", base, "megatron-core takes whole numbers above 0")
    model.rotary_base = float(base) if whole else model.rotary_base
    share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    found.unless(share == 1.0, "partial_rotary_factor", share, "1 is needed")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = kind in ("default", "linear", "llama3", "yarn")
    found.unless(known, "rope_type", kind, "default, linear, llama3 or yarn is needed")
    if kind == "yarn":
        _read_yarn(rope, model, found)
    if kind not in ("linear", "llama3"):
        return
    found.unless(
        is_positive(rope.get("factor")), "rope_scaling.factor", rope.get("factor"), "a number above 0 is needed"
    )
    factor = float(rope["factor"]) if is_positive(rope.get("factor")) else 1.0
    if kind == "linear":
        model.seq_len_interpolation_factor = factor
        return
    model.rope_scaling, model.rope_scaling_factor = True, factor
    for name, value in _LLAMA3_ROPE.items():
        given = rope.get(name, value)
        found.unless(given == value, f"rope_scaling.{name}", given, f"megatron-core has {value} built in")


def _read_yarn(rope: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    """What is left out has the values that Hugging Face's library takes."""
    factor: Any = rope.get("factor")
    attention_factor: Any = rope.get("attention_factor")
    original: Any = rope.get("original_max_position_embeddings") or model.max_position_embeddings
    fast, slow = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
    numbers = {"factor": factor, "beta_fast": fast, "beta_slow": slow}
    numbers |= {} if attention_factor is None else {"attention_factor": attention_factor}
    for name, value in numbers.items():
        found.unless(is_positive(value), f"rope_scaling.{name}", value, "a number above 0 is needed")
    name, message = "rope_scaling.original_max_position_embeddings", "a whole number from 1 to 2**31 is needed"
    is_length = is_count(original) and original <= 2**31
    found.unless(is_length, name, original, message)
    if not is_length or not all(map(is_positive, numbers.values())):
        return
    # An attention factor becomes a multiple of the scaling factor's logarithm, and that of 1 is 0.
    stretches = factor > 1 or (factor == 1 and attention_factor in (None, 1))
    found.unless(stretches, "rope_scaling.factor", factor, "a number above 1 is needed")
    model.position_embedding_type = "yarn"
    model.yarn_rotary_scaling_factor, model.yarn_original_max_position_embeddings = float(factor), original
    model.yarn_beta_fast, model.yarn_beta_slow = float(fast), float(slow)
    model.yarn_correction_range_round_to_int = bool(rope.get("truncate", True))
    model.max_position_embeddings = model.yarn_length
    if attention_factor and factor > 1:
        model.yarn_mscale, model.yarn_mscale_all_dim = (attention_factor - 1) / (0.1 * math.log(factor)), 0.0
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        model.yarn_mscale, model.yarn_mscale_all_dim = float(rope["mscale"]), float(rope["mscale_all_dim"])


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.position_embedding_type == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": model.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": model.yarn_original_max_position_embeddings,
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
        }
        if not model.yarn_correction_range_round_to_int:  # true is the default, and older versions do not know it
            scaling["truncate"] = False
        if model.yarn_mscale and model.yarn_mscale_all_dim:
            return scaling | {"mscale": model.yarn_mscale, "mscale_all_dim": model.yarn_mscale_all_dim}
        # Hugging Face's library reads no zeros.
        default = model.yarn_mscale is None or model.yarn_mscale_all_dim is None
        return scaling | ({} if default else {"attention_factor": concentration(model)})
    if model.rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3_ROPE}
    if model.seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": model.seq_len_interpolation_factor}
    return None


def _read_window(family: Family, values: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    window: Any = values.get("sliding_window")
    if family.window:
        found.unless(window is None or is_count(window), "sliding_window", window, "at least 1, or null, is needed")
        model.window_size = [window - 1, 0] if is_count(window) else None  # here the token itself does not count
        return
    layers, used = values.get("layer_types"), bool(values.get("use_sliding_window")) and window is not None
    first = 0 if family.experts is not None else values.get("max_window_layers", 0)  # Qwen 3's experts do not read it
    have_window = [kind == "sliding_attention" for kind in layers or ()]
    have_window = have_window or [used and layer >= first for layer in range(model.num_layers)]
    if not any(have_window):
        return
    message = "a window in all layers, and at least 1 token wide, is needed"
    holds = used and all(have_window) and is_count(window)
    found.unless(holds, "use_sliding_window", values.get("use_sliding_window"), message)
    model.window_size = [window - 1, 0] if holds else None


def _read_experts(family: Family, values: Mapping[str, Any], model: ModelConfig, found: Problems) -> None:
    assert family.experts is not None
    model.num_moe_experts = values[family.experts.count]
    model.moe_ffn_hidden_size = values[family.experts.width]
    model.moe_router_topk = chosen = values["num_experts_per_tok"]
    model.moe_aux_loss_coeff = float(values.get("router_aux_loss_coef") or 0.0)
    most = f"at most the {model.num_moe_experts} experts are needed"
    found.unless(chosen <= values[family.experts.count], "num_experts_per_tok", chosen, most)
    # Whether the chosen experts' weights sum to one, normalized before the choice or after it; Mixtral's always do.
    normalized = family.model_type != "qwen3_moe" or bool(values.get("norm_topk_prob"))
    model.moe_router_pre_softmax = not normalized
    alone = chosen == 1 and normalized
    found.unless(not alone, "num_experts_per_tok", 1, "one expert whose weight is always 1 has no counterpart")
    step = values.get("decoder_sparse_step", 1)
    found.unless(step == 1, "decoder_sparse_step", step, "experts in every layer are needed")
    dense = values.get("mlp_only_layers")
    found.unless(not dense, "mlp_only_layers", dense, "experts in every layer are needed")
