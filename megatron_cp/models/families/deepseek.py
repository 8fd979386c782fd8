"""DeepSeek V2 and V3: latent attention and experts.

V2's router is a softmax over all experts, without normalizing the chosen weights. V3's uses sigmoids, chooses with a
bias that has no gradient, and normalizes the chosen weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.base import SAME, Family, Problems, Settings, hf_names
from megatron_cp.models.families.common.experts import GroupedExperts
from megatron_cp.models.families.common.positions import RotaryPositions
from megatron_cp.models.families.common.weights import KEPT_IN_FLOAT32
from megatron_cp.models.families.common.windows import NoWindow
from megatron_cp.models.families.llama import ATTENTION_BIAS, SHAPE, with_experts

# Epsilon of norms inside latent attention, where it is fixed. Norms of layers have a setting.
_EPSILON = 1e-6


@dataclass(frozen=True)
class LatentAttention(Settings):
    """Latent attention, which has no query groups and no single head width."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        heads, groups = model.num_attention_heads, values.get("num_key_value_heads")
        problems.unless(
            groups in (None, heads), "num_key_value_heads", groups, f"must equal num_attention_heads={heads}"
        )
        model.num_query_groups = model.kv_channels = None

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        return super().write(model, problems) | {"num_key_value_heads": model.num_attention_heads}


@dataclass(frozen=True)
class LatentPositions(RotaryPositions):
    """Plain rotary positions, or YaRN, which scales the scores by ``mscale_all_dim``."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        rope = (values.get("rope_scaling") or {}) | (values.get("rope_parameters") or {})
        stretched = model.rope_scaling or model.seq_len_interpolation_factor is not None
        problems.unless(not stretched, "rope_scaling", rope, "must be YaRN or absent")
        if model.position_embedding_type != "yarn":
            return
        given, message = rope.get("attention_factor"), "must be absent: set mscale and mscale_all_dim instead"
        problems.unless(given is None, "rope_scaling.attention_factor", given, message)
        rounded = model.yarn_correction_range_round_to_int
        problems.unless(rounded, "rope_scaling.truncate", rope.get("truncate"), "must be true")
        both = not rope.get("mscale_all_dim") or bool(rope.get("mscale"))
        problems.unless(both, "rope_scaling.mscale", rope.get("mscale"), "must be a number if mscale_all_dim is one")

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        scales = (model.yarn_mscale, model.yarn_mscale_all_dim)
        zero = None not in scales and 0 in scales and model.position_embedding_type == "yarn"
        message = "must be two numbers other than 0, or null"
        problems.unless(not zero, NAME.model.yarn_mscale, list(scales), message)
        return super().write(model, problems)


@dataclass(frozen=True)
class DeepseekExperts(GroupedExperts):
    """Experts and shared experts of the same width, in all layers but the first ones."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        dense: Any = values.get("first_k_dense_replace")
        some = type(dense) is int and 0 <= dense < model.num_layers
        message = f"must be less than num_hidden_layers={model.num_layers}"
        problems.unless(some, "first_k_dense_replace", dense, message)
        if some and dense:
            model.moe_layer_freq = [0] * dense + [1] * (model.num_layers - dense)
        every = values.get("moe_layer_freq", 1)
        message = "must be 1: experts in all layers after the dense ones"
        problems.unless(every == 1, "moe_layer_freq", every, message)
        model.moe_shared_expert_intermediate_size = values["n_shared_experts"] * values["moe_intermediate_size"]

    def groups(self, values: Mapping[str, Any], problems: Problems) -> tuple[int, int]:
        if self.scores_of_a_group == 2:  # V3
            return super().groups(values, problems)
        method = values.get("topk_method")
        known = method in ("greedy", "group_limited_greedy")
        problems.unless(known, "topk_method", method, "must be greedy or group_limited_greedy")
        return (1, 1) if method == "greedy" else super().groups(values, problems)

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        values = super().write(model, problems)
        experts = [int("E" in parts) for parts in model.layer_types]
        dense = len(experts) - sum(experts)
        first = experts == [0] * dense + [1] * sum(experts)
        message = "must place experts in all layers after the dense ones"
        problems.unless(first, NAME.model.moe_layer_freq, model.moe_layer_freq, message)
        width, shared = values["moe_intermediate_size"] or 1, model.moe_shared_expert_intermediate_size or 0
        message = f"must be a multiple of moe_ffn_hidden_size={width}"
        whole = shared > 0 and shared % width == 0
        problems.unless(whole, NAME.model.moe_shared_expert_intermediate_size, shared, message)
        if self.scores_of_a_group == 1:
            values |= {"topk_method": "greedy" if values["n_group"] == 1 else "group_limited_greedy"}
        return values | {"first_k_dense_replace": dense, "n_shared_experts": shared // width}


_ATTENTION = LatentAttention(
    counts=hf_names(
        kv_lora_rank=SAME,
        qk_head_dim="qk_nope_head_dim",
        qk_pos_emb_head_dim="qk_rope_head_dim",
        v_head_dim=SAME,
    ),
    optional={**hf_names(q_lora_rank=SAME), "num_key_value_heads": "", "head_dim": ""},
    needed=dict(
        multi_latent_attention=True,
        qk_layernorm=True,
        layernorm_epsilon=_EPSILON,
        rope_scaling=False,
        seq_len_interpolation_factor=None,
        window_size=None,
        add_qkv_bias=False,
    ),
    given={"rms_norm_eps": _EPSILON},
)
_V3 = DeepseekExperts(
    counts={
        **hf_names(
            num_moe_experts="n_routed_experts",
            moe_ffn_hidden_size="moe_intermediate_size",
            moe_router_topk="num_experts_per_tok",
        ),
        "n_shared_experts": "",
    },
    needed=dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_pre_softmax=False,
        moe_shared_expert_gate=False,
        moe_latent_size=None,
    ),
    given={"rope_interleave": True},
    written={
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
)
_SOFTMAX = dict(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)
_V2 = replace(
    _V3,
    needed={**_V3.needed, **_SOFTMAX, "moe_router_pre_softmax": True},
    given={},
    written=dict(moe_layer_freq=1, scoring_func="softmax"),
    scores_of_a_group=1,
)
_SHARED = "mlp.shared_experts"
_WEIGHTS = with_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj").with_layer_names(
    {
        "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
        "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
        "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
        "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
        "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
        "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
        "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
        "mlp.router.expert_bias": (f"mlp.{KEPT_IN_FLOAT32}",),
        f"{_SHARED}.linear_fc1.weight": (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"),
        f"{_SHARED}.linear_fc2.weight": (f"{_SHARED}.down_proj.weight",),
    }
)
FAMILIES = tuple(
    Family(
        f"deepseek_v{version}",
        f"DeepseekV{version}ForCausalLM",
        (SHAPE, _ATTENTION, LatentPositions(), NoWindow(), ATTENTION_BIAS, experts),
        _WEIGHTS,
        optional_features=("moe_router_pre_softmax",),
        marks=("moe_router_score_function",),
    )
    for version, experts in ((2, _V2), (3, _V3))
)
