"""Nemotron-H, up to Nemotron 3: Mamba-2, attention, MLPs and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.base import FEATURES, SAME, Family, Problems, Settings, hf_names, is_count
from megatron_cp.models.families.common.experts import GroupedExperts
from megatron_cp.models.families.common.weights import EMBEDDING, KEPT_IN_FLOAT32, OUTPUT, WeightNames
from megatron_cp.models.families.llama import PLAIN
from megatron_cp.models.hybrid_pattern import layers_of
from megatron_cp.models.layers.mamba.shape import CONV_WIDTH, MambaShape

_LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


@dataclass(frozen=True)
class HybridLayers(Settings):
    """Layer types, sizes, and fixed settings."""

    def check(self, values: Mapping[str, Any], problems: Problems) -> None:
        super().check(values, problems)
        kinds: Any = values.get("layers_block_type")
        known = isinstance(kinds, list) and len(kinds) > 0 and set(map(str, kinds)) <= _LETTERS.keys()
        problems.unless(known, "layers_block_type", kinds, f"must be a list of {', '.join(_LETTERS)}")

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        model.hybrid_layer_pattern = "".join(_LETTERS[kind] for kind in values["layers_block_type"])
        model.num_layers = len(model.hybrid_layer_pattern)
        limit: Any = values.get("time_step_limit", (0.0, math.inf))
        problems.unless(list(limit) == [0.0, math.inf], "time_step_limit", limit, "must be absent")

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        pattern, kinds = layers_of(model.hybrid_layer_pattern), {letter: kind for kind, letter in _LETTERS.items()}
        return super().write(model, problems) | {
            "mamba_num_heads": MambaShape.of(model).heads,
            "num_key_value_heads": model.kv_heads,
            "num_hidden_layers": len(pattern),
            "layers_block_type": [kinds[letter] for letter in pattern],
        }


@dataclass(frozen=True)
class HybridExperts(GroupedExperts):
    """Experts beside a shared expert, in expert layers."""

    def applies_to(self, source: Mapping[str, Any] | ModelConfig) -> bool:
        if isinstance(source, ModelConfig):
            return "E" in layers_of(source.hybrid_layer_pattern)
        kinds = source.get("layers_block_type")
        return isinstance(kinds, list) and "moe" in kinds

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        latent: Any = values.get("moe_latent_size")
        problems.unless(latent is None or is_count(latent), "moe_latent_size", latent, "must be at least 1 or null")
        model.moe_latent_size = latent

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        shared = model.moe_shared_expert_intermediate_size
        message = "must be set: models of this family have a shared expert"
        problems.unless(bool(shared), NAME.model.moe_shared_expert_intermediate_size, shared, message)
        return super().write(model, problems) | dict(moe_latent_size=model.moe_latent_size)


_LAYERS = HybridLayers(
    counts=hf_names(
        hidden_size=SAME,
        ffn_hidden_size="intermediate_size",
        num_attention_heads=SAME,
        num_query_groups="num_key_value_heads",
        kv_channels="head_dim",
        max_position_embeddings=SAME,
        vocab_size=SAME,
        mamba_state_dim="ssm_state_size",
        mamba_head_dim=SAME,
        mamba_num_heads=SAME,
        mamba_num_groups="n_groups",
    ),
    numbers=hf_names(init_method_std="initializer_range"),
    needed=PLAIN
    | dict(
        architecture="hybrid",
        position_embedding_type="none",
        layernorm_epsilon=1e-5,
        activation_func="squared_relu",
        gated_linear_unit=False,
        add_qkv_bias=False,
        qk_layernorm=False,
        window_size=None,
        multi_latent_attention=False,
        share_embeddings_and_output_weights=False,
    ),
    given={
        "conv_kernel": CONV_WIDTH,
        "use_conv_bias": True,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,  # fixed in the norm inside Mamba layers
        "use_bias": False,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "residual_in_fp32": False,
    },
    # Hugging Face's library raises shorter time steps to time_step_min; this package does not.
    written={"attention_dropout": 0.0, "time_step_min": 1e-30, "num_nextn_predict_layers": 0},
    absent=("quantization_config", "compression_config"),
)
_EXPERTS = HybridExperts(
    counts=hf_names(
        num_moe_experts="n_routed_experts",
        moe_ffn_hidden_size="moe_intermediate_size",
        moe_shared_expert_intermediate_size=SAME,
        moe_router_topk="num_experts_per_tok",
    ),
    needed=dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_shared_expert_gate=False,
        moe_router_pre_softmax=False,
    ),
    given={"n_shared_experts": 1},
)
# Each layer has one type: Mamba, attention, MLP or experts. Both sides order the input projection as z, x, B, C, dt.
_WEIGHTS = WeightNames(
    "backbone.layers",
    {
        EMBEDDING: "backbone.embeddings.weight",
        "decoder.final_norm.weight": "backbone.norm_f.weight",
        OUTPUT: "lm_head.weight",
    },
    {
        **dict.fromkeys(("norm.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight"), ("norm.weight",)),
        **{f"mixer.{name}": (f"mixer.{name}",) for name in ("dt_bias", "A_log", "D", "norm.weight")},
        **{f"mixer.{name}.weight": (f"mixer.{name}.weight",) for name in ("in_proj", "out_proj")},
        **{f"mixer.conv1d_{name}": (f"mixer.conv1d.{name}",) for name in ("weight", "bias")},
        "self_attention.linear_qkv.weight": ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"),
        "self_attention.linear_proj.weight": ("mixer.o_proj.weight",),
        "mlp.linear_fc1.weight": ("mixer.up_proj.weight",),
        "mlp.linear_fc2.weight": ("mixer.down_proj.weight",),
        "mlp.router.weight": ("mixer.gate.weight",),
        "mlp.router.expert_bias": (f"mixer.{KEPT_IN_FLOAT32}",),
        **{f"mlp.{name}.weight": (f"mixer.{name}.weight",) for name in ("fc1_latent_proj", "fc2_latent_proj")},
        "mlp.experts.local_experts.{}.linear_fc1.weight": ("mixer.experts.{}.up_proj.weight",),
        "mlp.experts.local_experts.{}.linear_fc2.weight": ("mixer.experts.{}.down_proj.weight",),
        "mlp.shared_experts.linear_fc1.weight": ("mixer.shared_experts.up_proj.weight",),
        "mlp.shared_experts.linear_fc2.weight": ("mixer.shared_experts.down_proj.weight",),
    },
)
FAMILIES = (Family("nemotron_h", "NemotronHForCausalLM", (_LAYERS, _EXPERTS), _WEIGHTS, optional_features=FEATURES),)
