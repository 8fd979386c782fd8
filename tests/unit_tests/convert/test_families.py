"""Models that have a counterpart, in both directions."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.config.setting import FUNCTION, WEIGHTS, facts_of
from megatron_cp.convert.exporting import describe_positions
from megatron_cp.models.families import hf_from_model, model_from_hf

# Settings that change the set of weights or the model's computation.
DECISIVE = {name for name, facts in facts_of(ModelConfig).items() if {WEIGHTS, FUNCTION} & set(facts.affects)}
LLAMA = ModelConfig(vocab_size=256, seq_length=64, max_position_embeddings=64, num_query_groups=2)
LLAMA = RunConfig(model=LLAMA).finalize().model
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 512}
YARN: dict[str, Any] = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
}
LATENT = EXPERTS | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "layernorm_epsilon": 1e-6,
    "num_query_groups": None,
    "kv_channels": None,
    "kv_lora_rank": 48,
    "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 40,
    "moe_router_dtype": "fp32",
    "moe_shared_expert_intermediate_size": 512,
}
DEEPSEEK2 = LATENT | {"moe_router_pre_softmax": True}
DEEPSEEK3 = LATENT | {
    "q_lora_rank": 56,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_layer_freq": [0, 1],
}
GPT_OSS = EXPERTS | {
    "activation_func": "quick_gelu",
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "window_size": [127, 0],
    "window_attn_skip_freq": 2,
}
HYBRID: dict[str, Any] = {
    "architecture": "hybrid",
    "hybrid_layer_pattern": "M-*M",
    "num_layers": 4,
    "position_embedding_type": "none",
    "activation_func": "squared_relu",
    "gated_linear_unit": False,
    "mamba_state_dim": 16,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_num_heads": 12,
}
HYBRID_EXPERTS = HYBRID | {
    "hybrid_layer_pattern": "ME*E",
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "moe_router_dtype": "fp32",
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
GEMMA3: dict[str, Any] = {
    "num_layers": 7,
    "window_size": [511, 0],
    "window_attn_skip_freq": 6,
    "rotary_base": 1e6,
    "rotary_base_local": 1e4,
    "layernorm_zero_centered_gamma": True,
    "sandwich_norm": True,
    "qk_layernorm": True,
    "scale_embeddings": True,
    "activation_func": "fast_gelu",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"share_embeddings_and_output_weights": True}),
    "llama 3": ("llama", {"rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 5e5}),
    "linear": ("llama", {"seq_len_interpolation_factor": 4.0}),
    "yarn": ("llama", YARN),
    "yarn, every setting": (
        "qwen3",
        YARN
        | {
            "qk_layernorm": True,
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
            "yarn_mscale": 0.7,
            "yarn_mscale_all_dim": 1.0,
            "yarn_correction_range_round_to_int": False,
        },
    ),
    "yarn, not concentrated": ("llama", YARN | {"yarn_mscale": 0.0, "yarn_mscale_all_dim": 0.0}),
    "window": ("mistral", {"window_size": [4095, 0]}),
    "bias": ("qwen2", {"add_qkv_bias": True}),
    "bias and window": ("qwen2", {"add_qkv_bias": True, "window_size": [7, 0]}),
    "norm": ("qwen3", {"qk_layernorm": True, "kv_channels": 64}),
    "experts": ("mixtral", EXPERTS | {"moe_aux_loss_coeff": 0.02}),
    "experts and window": ("mixtral", EXPERTS | {"window_size": [7, 0]}),
    "experts and norm": ("qwen3_moe", EXPERTS | {"qk_layernorm": True}),
    "experts, norm and window": ("qwen3_moe", EXPERTS | {"qk_layernorm": True, "window_size": [7, 0]}),
    "pre-softmax": ("qwen3_moe", EXPERTS | {"qk_layernorm": True, "moe_router_pre_softmax": True}),
    "one expert": (
        "qwen3_moe",
        EXPERTS | {"qk_layernorm": True, "moe_router_pre_softmax": True, "moe_router_topk": 1},
    ),
    "latent": ("deepseek_v2", DEEPSEEK2),
    "latent, yarn, shared experts": (
        "deepseek_v2",
        DEEPSEEK2
        | YARN
        | {"yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.8, "moe_shared_expert_intermediate_size": 1024},
    ),
    "latent, groups": (
        "deepseek_v2",
        DEEPSEEK2 | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "num_moe_experts": 8},
    ),
    "latent, sigmoid": ("deepseek_v3", DEEPSEEK3),
    "latent, sigmoid, yarn, groups": (
        "deepseek_v3",
        DEEPSEEK3
        | YARN
        | {"num_moe_experts": 8, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    "latent, sigmoid, one expert": ("deepseek_v3", DEEPSEEK3 | {"moe_router_topk": 1}),
    "sinks": ("gpt_oss", GPT_OSS),
    "sinks, windows in listed layers": ("gpt_oss", GPT_OSS | {"num_layers": 3, "window_attn_skip_freq": [0, 1, 1]}),
    "gemma": ("gemma3_text", GEMMA3),
    "gemma, stretched and scaled": (
        "gemma3_text",
        GEMMA3 | {"seq_len_interpolation_factor": 8.0, "softmax_scale": 168**-0.5, "kv_channels": 128},
    ),
    "gemma, layers as listed": ("gemma3_text", GEMMA3 | {"window_attn_skip_freq": [0, 1, 1, 1, 0, 0, 1]}),
    "gemma, a window everywhere": ("gemma3_text", GEMMA3 | {"window_attn_skip_freq": None}),
    "gemma, no window": (
        "gemma3_text",
        GEMMA3 | {"window_size": None, "window_attn_skip_freq": None, "rotary_base_local": None},
    ),
    "hybrid": ("nemotron_h", HYBRID),
    "hybrid with experts": ("nemotron_h", HYBRID_EXPERTS),
    "hybrid with groups of experts": (
        "nemotron_h",
        HYBRID_EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    "hybrid with experts in fewer dimensions": ("nemotron_h", HYBRID_EXPERTS | {"moe_latent_size": 48}),
    "hybrid with one expert": ("nemotron_h", HYBRID_EXPERTS | {"moe_router_topk": 1}),
}


@pytest.mark.parametrize("name", MODELS)
def test_settings_survive_export_and_import(name: str) -> None:
    expected, changes = MODELS[name]
    model = replace(LLAMA, **changes)
    family, values = hf_from_model(model, rows=256)
    assert family.model_type == expected == values["model_type"]
    again_family, again = model_from_hf(values)
    assert again_family == family
    assert replace(again, seq_length=model.seq_length, expert_tensor_parallel_size=1) == model


@pytest.mark.parametrize(("name", "declared"), [("plain", 96), ("llama 3", 96), ("hybrid", 96), ("yarn", 64)])
def test_training_at_a_greater_length_is_declared(name: str, declared: int) -> None:
    """Every longer length but YaRN's must be declared.

    YaRN's ratio to the original length may count.
    """
    model = replace(LLAMA, **MODELS[name][1])
    _, longer = hf_from_model(replace(model, seq_length=96), rows=256)
    _, shorter = hf_from_model(replace(model, seq_length=32), rows=256)
    assert (longer["max_position_embeddings"], shorter["max_position_embeddings"]) == (declared, 64)
    assert longer | {"max_position_embeddings": 64} == shorter, "the scaling begins where it did"


@pytest.mark.parametrize(
    ("name", "reported"), [("plain", "is 96, the length of training sequences"), ("yarn", "is 64, YaRN's factor")]
)
def test_training_at_a_greater_length_warns(name: str, reported: str) -> None:
    trained = RunConfig(model=replace(LLAMA, **MODELS[name][1], seq_length=96))
    _, values = hf_from_model(trained.model, rows=256)
    (text,) = describe_positions(trained.model, values["max_position_embeddings"])
    assert text.startswith(f"max_position_embeddings in config.json {reported}")
    trained.model.seq_length = 64
    assert describe_positions(trained.model, 64) == []


def factor_of_older_versions(values: dict[str, Any]) -> float:
    """Return the factor that transformers 4.51 uses for any given factor.

    Its ``_compute_yarn_parameters`` computes the factor from the lengths.
    """
    return values["max_position_embeddings"] / values["rope_scaling"]["original_max_position_embeddings"]


@pytest.mark.parametrize(("declared", "note"), [(256, "the run's setting was 256"), (40, "setting was 40"), (64, "")])
def test_older_versions_read_the_same_yarn(declared: int, note: str) -> None:
    """The export must declare the factor times the original length.

    For any declared length.
    """
    trained = RunConfig(model=replace(LLAMA, **YARN, max_position_embeddings=declared))
    _, values = hf_from_model(trained.model, rows=256)
    assert values["max_position_embeddings"] == 64 and factor_of_older_versions(values) == 4.0
    positions = describe_positions(trained.model, 64)
    assert note in "".join(positions) and bool(positions) == bool(note)
    # Also an import of a model that declares another length, as Qwen 3 with its documented scaling does.
    assert model_from_hf(values | {"max_position_embeddings": declared})[1].max_position_embeddings == 64


def test_a_length_that_is_no_integer_is_reported() -> None:
    trained = RunConfig(model=replace(LLAMA, **YARN | {"yarn_rotary_scaling_factor": 1.3}, max_position_embeddings=21))
    _, values = hf_from_model(trained.model, rows=256)
    (text,) = describe_positions(replace(trained.model, seq_length=16), 21)
    assert "20.8 is not whole" in text and "factor 1.3125" in text and factor_of_older_versions(values) == 1.3125


def test_a_model_without_a_window_states_it_in_two_keys() -> None:
    """transformers 4.51 applies Qwen's default window without use_sliding_window, too.

    The default window is 4096 tokens.
    """
    for name in ("bias", "norm", "experts and norm"):
        _, values = hf_from_model(replace(LLAMA, **MODELS[name][1]), rows=256)
        assert (values["use_sliding_window"], values["sliding_window"]) == (False, None)


def test_truncation_is_written_unless_it_is_the_default() -> None:
    written = {name: hf_from_model(replace(LLAMA, **MODELS[name][1]), 256)[1]["rope_scaling"] for name in MODELS
               if name.startswith("yarn")}  # fmt: skip
    assert {name: scaling.get("truncate") for name, scaling in written.items()} == {
        "yarn": None, "yarn, every setting": False, "yarn, not concentrated": None,
    }  # fmt: skip


NO_COUNTERPART: dict[str, dict[str, Any]] = {
    "position_embedding_type": {"position_embedding_type": "learned_absolute"},
    "rotary_percent": {"rotary_percent": 0.5},
    "rotary_interleaved": {"rotary_interleaved": True},
    "normalization": {"normalization": "LayerNorm"},
    "activation_func": {"activation_func": "gelu"},
    "gated_linear_unit": {"gated_linear_unit": False},
    "glu_linear_offset": {"glu_linear_offset": 1.0},
    "activation_func_clamp_value": {"activation_func_clamp_value": 7.0},
    "add_bias_linear": {"add_bias_linear": True},
    "attention_mask_type": {"attention_mask_type": "no_mask"},
    "softmax_scale": {"softmax_scale": 0.2},
    "softmax_type": {"softmax_type": "learnable"},
    "window_attn_skip_freq": {"window_size": [7, 0], "window_attn_skip_freq": 2},
    "layernorm_zero_centered_gamma=True": {"layernorm_zero_centered_gamma": True},
    "layernorm_zero_centered_gamma=False": GEMMA3 | {"layernorm_zero_centered_gamma": False},
    "scale_embeddings=True": {"scale_embeddings": True},
    "scale_embeddings=False": GEMMA3 | {"scale_embeddings": False},
    "sandwich_norm": {"sandwich_norm": True},
    "rotary_base_local=10000.0": {"window_size": [7, 0], "rotary_base_local": 1e4},
    "rotary_base_local: must be set": GEMMA3 | {"rotary_base_local": None, "seq_len_interpolation_factor": 8.0},
    "softmax_scale=0.3": GEMMA3 | {"softmax_scale": 0.3},
    "position_embedding_type=yarn": GEMMA3 | YARN | {"rotary_base_local": None},
    "activation_func=fast_gelu": {"activation_func": "fast_gelu"},
    "multi_latent_attention": {"multi_latent_attention": True, "qk_layernorm": True, "layernorm_epsilon": 1e-6},
    "qk_layernorm": DEEPSEEK2 | {"qk_layernorm": False},
    "layernorm_epsilon": DEEPSEEK2 | {"layernorm_epsilon": 1e-5},
    "rope_scaling=True": DEEPSEEK2 | {"rope_scaling": True},
    "seq_len_interpolation_factor": DEEPSEEK2 | {"seq_len_interpolation_factor": 4.0},
    "window_size=": DEEPSEEK2 | {"window_size": [7, 0]},
    "moe_shared_expert_gate": DEEPSEEK2 | {"moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 512},
    "moe_shared_expert_intermediate_size=0": DEEPSEEK2 | {"moe_shared_expert_intermediate_size": None},
    "moe_shared_expert_intermediate_size=500": DEEPSEEK2 | {"moe_shared_expert_intermediate_size": 500},
    "moe_router_pre_softmax=False": DEEPSEEK2 | {"moe_router_pre_softmax": False},
    "moe_router_enable_expert_bias=False": DEEPSEEK3 | {"moe_router_enable_expert_bias": False},
    "moe_layer_freq=": DEEPSEEK2 | {"moe_layer_freq": [1, 0]},
    "yarn_mscale": DEEPSEEK2 | YARN | {"yarn_mscale": 0.0, "yarn_mscale_all_dim": 1.0},
    "1 of a token's experts": DEEPSEEK2
    | {"num_moe_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
    "2 of a token's experts": DEEPSEEK3
    | {"num_moe_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "gated_linear_unit=True": HYBRID | {"gated_linear_unit": True},
    "activation_func=silu": HYBRID | {"activation_func": "silu"},
    "position_embedding_type=rope": HYBRID | {"position_embedding_type": "rope"},
    "layernorm_epsilon=1e-06": HYBRID | {"layernorm_epsilon": 1e-6},
    "share_embeddings_and_output_weights": HYBRID | {"share_embeddings_and_output_weights": True},
    "must be set: models of this family have a shared expert": HYBRID_EXPERTS
    | {"moe_shared_expert_intermediate_size": None},
    "moe_router_score_function=softmax": HYBRID_EXPERTS
    | {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False},
    "window_size": {"window_size": [7, 3]},
    "rope_scaling": {"rope_scaling": True, "seq_len_interpolation_factor": 4.0},
    "moe_shared_expert_intermediate_size": EXPERTS
    | {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True},
    "moe_layer_freq": EXPERTS | {"moe_layer_freq": 2},
    "moe_router_group_topk": EXPERTS | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "moe_router_enable_expert_bias": EXPERTS
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "moe_router_score_function": EXPERTS | {"moe_router_score_function": "sigmoid"},
    "moe_router_topk_scaling_factor": EXPERTS | {"moe_router_topk_scaling_factor": 2.5},
    "moe_router_load_balancing_type": EXPERTS | {"moe_router_load_balancing_type": "sinkhorn"},
    "add_qkv_bias": {"add_qkv_bias": True, "qk_layernorm": True},
    "moe_latent_size": EXPERTS | {"moe_latent_size": 48},
    "moe_latent_size=4": DEEPSEEK2 | {"moe_latent_size": 48},
    "moe_router_pre_softmax": EXPERTS | {"moe_router_pre_softmax": True},
    "moe_apply_probs_on_input": EXPERTS | {"moe_router_topk": 1, "moe_apply_probs_on_input": True},
    "attention_output_gate": {"attention_output_gate": True},
    "qk_l2_norm": {"qk_l2_norm": True},
    "no_rope_freq": {"no_rope_freq": 2},
    "use_mup": {"use_mup": True},
}


@pytest.mark.parametrize("name", NO_COUNTERPART)
def test_features_of_no_family_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        hf_from_model(replace(LLAMA, **NO_COUNTERPART[name]), rows=256)


def test_every_setting_of_the_model_is_thought_of() -> None:
    """A new setting that changes a model's computation must be converted or refused."""

    of_the_refused = {name for changes in NO_COUNTERPART.values() for name in changes}
    of_the_converted = {name for _, changes in MODELS.values() for name in changes}
    shape = {
        *("vocab_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        *("max_position_embeddings", "layernorm_epsilon"),
    }
    left_out = {"mtp_num_layers", "mtp_use_repeated_layer"}  # the command logs it
    left_out |= {name for name in DECISIVE if name.startswith("mup_")}  # read with use_mup only
    assert of_the_refused | of_the_converted | shape | set(HYBRID) | left_out >= DECISIVE


def test_every_setting_of_a_hybrid_model_is_thought_of() -> None:
    """A hybrid model's setting must be converted, refused, or have no meaning.

    Some settings are converted for other models only.
    """

    _, values = hf_from_model(replace(LLAMA, **HYBRID_EXPERTS), rows=256)
    usual = ModelConfig()
    unread = {
        *(name for name in DECISIVE if name.startswith(("yarn_", "rope_", "rotary_", "mup_"))),  # no positions, no muP
        *("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),  # no latent attention
        *("seq_len_interpolation_factor", "moe_layer_freq", "mtp_num_layers", "mtp_use_repeated_layer"),
    }
    converted = {"max_position_embeddings", "num_layers", "vocab_size", *HYBRID_EXPERTS}
    for name in DECISIVE - unread - converted:
        value = getattr(usual, name)
        other = not value if isinstance(value, bool) else 3 if value is None or isinstance(value, int) else "another"
        try:
            changed = hf_from_model(replace(LLAMA, **HYBRID_EXPERTS | {name: other}), rows=256)[1]
        except ConfigError:
            continue
        assert changed != values, name


@pytest.mark.parametrize(
    ("rows", "unit"), [(128256, 128), (151936, 128), (32000, 128), (50257, 1), (151646, 2), (32001, 1), (32016, 16)]
)
def test_a_published_vocabulary_is_not_padded(rows: int, unit: int) -> None:
    _, values = hf_from_model(LLAMA, rows)
    assert model_from_hf(values)[1].make_vocab_size_divisible_by == unit
    assert rows % unit == 0


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_windows_in_some_layers_only_are_refused_or_not_used(model_type: str) -> None:
    model = replace(LLAMA, **next(changes for family, changes in MODELS.values() if family == model_type))
    _, values = hf_from_model(model, rows=256)
    window = values | {"sliding_window": 64, "max_window_layers": 1}
    if model_type in ("mistral", "mixtral"):  # they have no such setting
        for use in (False, True):
            assert model_from_hf(window | {"use_sliding_window": use})[1].window_size == [63, 0]
        return
    everywhere, some = ["sliding_attention"] * 2, ["full_attention", "sliding_attention"]
    for unused in ({}, {"use_sliding_window": False}):
        assert model_from_hf(window | unused)[1].window_size is None
    used = {"use_sliding_window": True}
    for in_all in ({"max_window_layers": 0}, {"layer_types": everywhere}):
        assert model_from_hf(window | used | in_all)[1].window_size == [63, 0]
    if model_type == "qwen3_moe":  # it does not read max_window_layers
        assert model_from_hf(window | used)[1].window_size == [63, 0]
    else:
        assert model_from_hf(window | used | {"max_window_layers": 2})[1].window_size is None
        with pytest.raises(ConfigError, match="use_sliding_window=True: must give all layers a window"):
            model_from_hf(window | used)
    with pytest.raises(ConfigError, match="use_sliding_window"):
        model_from_hf(window | used | {"layer_types": some})


@pytest.mark.parametrize(
    ("setting", "value"), [("decoder_sparse_step", 2), ("mlp_only_layers", [0]), ("num_experts_per_tok", 1)]
)
def test_experts_in_some_layers_only_and_a_weight_of_one_are_refused(setting: str, value: Any) -> None:
    _, values = hf_from_model(replace(LLAMA, **MODELS["experts and norm"][1]), rows=256)
    with pytest.raises(ConfigError, match=setting):
        model_from_hf(values | {setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_size", "wide"),
        ("num_attention_heads", 0),
        ("vocab_size", None),
        ("head_dim", -8),
        ("num_key_value_heads", -4),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
        ("rope_theta", -5),
        ("rope_theta", float("inf")),
        ("rope_scaling", {"rope_type": "linear", "factor": 0.0}),
        ("rope_scaling", {"rope_type": "linear", "factor": "eight"}),
        ("rope_scaling", {"rope_type": "llama3"}),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 0.5}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16.5}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "many"}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**400}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "beta_slow": "few"}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.2}),
        ("rope_parameters", {"full_attention": {"rope_theta": 5e5}}),
    ],
)
def test_wrong_types_are_reported(setting: str, value: Any) -> None:
    _, values = hf_from_model(LLAMA, rows=256)
    with pytest.raises(ConfigError, match=f"{setting}.*must be "):
        model_from_hf(values | {setting: value})


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("window", "sliding_window", 0),
        ("window", "sliding_window", -1),
        ("experts", "num_experts_per_tok", 9),
        ("experts", "num_experts_per_tok", 0),
        ("experts", "num_local_experts", 0),
        ("experts and norm", "moe_intermediate_size", None),
    ],
)
def test_wrong_values_of_some_families_are_reported(name: str, setting: str, value: Any) -> None:
    _, values = hf_from_model(replace(LLAMA, **MODELS[name][1]), rows=256)
    with pytest.raises(ConfigError, match=f"{setting}.*must be "):
        model_from_hf(values | {setting: value})


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("latent", "kv_lora_rank", None),
        ("latent", "q_lora_rank", 0),
        ("latent", "qk_rope_head_dim", 16.0),
        ("latent", "n_routed_experts", 0),
        ("latent", "n_shared_experts", -1),
        ("latent", "num_experts_per_tok", 5),
        ("latent", "num_key_value_heads", 2),
        ("latent", "rms_norm_eps", 1e-5),
        ("latent", "first_k_dense_replace", 2),
        ("latent", "first_k_dense_replace", None),
        ("latent", "moe_layer_freq", 2),
        ("latent", "routed_scaling_factor", 0),
        ("latent", "norm_topk_prob", True),
        ("latent", "topk_method", "noaux_tc"),
        ("latent", "rope_scaling", {"rope_type": "linear", "factor": 4.0}),
        ("latent", "rope_scaling.attention_factor", {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.1}),
        ("latent", "rope_scaling.truncate", {"rope_type": "yarn", "factor": 4.0, "truncate": False}),
        ("latent", "rope_scaling.mscale", {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}),
        ("latent, groups", "topk_group", 1),
        ("latent, sigmoid", "norm_topk_prob", False),
        ("latent, sigmoid", "rope_interleave", False),
        ("latent, sigmoid, yarn, groups", "topk_group", 4),
    ],
)
def test_unsupported_features_of_deepseek_are_refused(name: str, setting: str, value: Any) -> None:
    _, values = hf_from_model(replace(LLAMA, **MODELS[name][1]), rows=256)
    with pytest.raises(ConfigError, match=rf"{setting}.*must "):
        model_from_hf(values | {setting.partition(".")[0]: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_size", 0),
        ("n_groups", None),
        ("initializer_range", -1.0),
        ("layers_block_type", None),
        ("layers_block_type", []),
        ("layers_block_type", ["linear_attention", "convolution"]),
        ("conv_kernel", 3),
        ("use_conv_bias", False),
        ("mlp_hidden_act", "silu"),
        ("layer_norm_epsilon", 1e-6),
        ("use_bias", True),
        ("mlp_bias", True),
        ("tie_word_embeddings", True),
        ("sliding_window", 64),
        ("moe_latent_size", 0),
        ("time_step_limit", [0.0, 0.5]),
        ("quantization_config", {"bits": 8}),
        ("num_experts_per_tok", 9),
        ("n_routed_experts", 0),
        ("norm_topk_prob", False),
        ("routed_scaling_factor", 0),
        ("n_shared_experts", 2),
    ],
)
def test_unsupported_features_of_nemotron_are_refused(setting: str, value: Any) -> None:
    _, values = hf_from_model(replace(LLAMA, **HYBRID_EXPERTS), rows=256)
    with pytest.raises(ConfigError, match=rf"{setting}.*(must |not supported)"):
        model_from_hf(values | {setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("layer_types", None),
        ("layer_types", ["sliding_attention", "local"]),
        ("layer_types", ["full_attention"]),
        ("sliding_window", None),
        ("swiglu_limit", 0.0),
        ("swiglu_alpha", 1.0),
        ("attention_bias", False),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "mxfp4"}),
        ("num_experts_per_tok", 9),
    ],
)
def test_unsupported_features_of_gpt_oss_are_refused(setting: str, value: Any) -> None:
    _, values = hf_from_model(replace(LLAMA, **GPT_OSS), rows=256)
    with pytest.raises(ConfigError, match=rf"{setting}.*(must |not supported)"):
        model_from_hf(values | {setting: value})


def test_groups_of_nemotrons_experts_are_chosen_by_two() -> None:
    _, values = hf_from_model(replace(LLAMA, **MODELS["hybrid with groups of experts"][1]), rows=256)
    with pytest.raises(ConfigError, match=r"topk_group.*must choose 2 of the 4 experts in each group"):
        model_from_hf(values | {"topk_group": 4})


def test_mixtrals_weights_always_sum_to_one() -> None:
    """Mixtral has no setting for that."""
    _, values = hf_from_model(replace(LLAMA, **MODELS["experts"][1]), rows=256)
    assert not model_from_hf(values | {"norm_topk_prob": False})[1].moe_router_pre_softmax


def test_the_base_of_the_rotation_is_the_one_that_the_model_has() -> None:
    assert hf_from_model(replace(LLAMA, rotary_base=10000.9), rows=256)[1]["rope_theta"] == 10000


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("final_logit_softcapping", 30.0, ""),
        ("attn_logit_softcapping", 50.0, ""),
        ("use_bidirectional_attention", True, ""),
        ("attention_bias", True, ""),
        ("hidden_activation", "gelu", ""),
        ("query_pre_attn_scalar", 0, ""),
        ("sliding_window", 0, ""),
        ("layer_types", ["full_attention"], ""),
        ("layer_types", ["chunked_attention"] * 7, ""),
        ("rope_local_base_freq", -1, ""),
        ("rope_theta", 10000.5, ""),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_type"),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}, "rope_scaling.factor"),
        ("rope_parameters", {"sliding_attention": {"rope_type": "linear"}}, "sliding_attention.rope_type"),
    ],
)
def test_unsupported_features_of_gemma_are_refused(setting: str, value: Any, named: str) -> None:
    _, values = hf_from_model(replace(LLAMA, **GEMMA3), rows=256)
    with pytest.raises(ConfigError, match=rf"{named or setting}.*(must |not supported)"):
        model_from_hf(values | {setting: value})


def test_gemma_is_read_as_all_versions_write_it() -> None:
    """Each version's form of the rotary base and layer types must be read.

    Version 5 has one set of positions for each kind of layer; the oldest have a number instead of a list.
    """
    model = replace(LLAMA, **GEMMA3, seq_len_interpolation_factor=8.0)
    _, values = hf_from_model(model, rows=256)
    sets = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = {name: value for name, value in values.items() if name not in ("rope_theta", "rope_scaling")}
    new = new | {"rope_local_base_freq": None, "rope_parameters": sets}
    oldest = {name: value for name, value in values.items() if name != "layer_types"}
    assert model_from_hf(new) == model_from_hf(oldest) == model_from_hf(values)
