"""Llama's family, and settings shared by Llama-like families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.base import SAME, Family, Problems, Settings, hf_names
from megatron_cp.models.families.common.positions import RotaryPositions
from megatron_cp.models.families.common.weights import EMBEDDING, OUTPUT, WeightNames
from megatron_cp.models.families.common.windows import NoWindow

# Settings of Llama's models. Other families reuse them, with changes.
PLAIN: dict[str, Any] = dict(
    architecture="gpt",
    normalization="RMSNorm",
    activation_func="silu",
    gated_linear_unit=True,
    add_bias_linear=False,
    attention_mask_type="causal",
    softmax_scale=None,
    softmax_type="vanilla",
    glu_linear_offset=0.0,
    activation_func_clamp_value=None,
    rotary_base_local=None,
    layernorm_zero_centered_gamma=False,
    sandwich_norm=False,
    scale_embeddings=False,
    attention_output_gate=False,
    qk_l2_norm=False,
    no_rope_freq=None,
    use_mup=False,
    moe_apply_probs_on_input=False,
    window_attn_skip_freq=None,
)
ATTENTION_BIAS = Settings(written={"attention_bias": False})


@dataclass(frozen=True)
class Heads(Settings):
    """Query groups and the width of heads."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        heads = model.num_attention_heads
        model.num_query_groups = model.num_query_groups or heads
        model.kv_channels = model.kv_channels or model.hidden_size // heads


# Model sizes, norms, initial weights, and tied embeddings.
SHAPE = Settings(
    counts=hf_names(
        num_layers="num_hidden_layers",
        hidden_size=SAME,
        ffn_hidden_size="intermediate_size",
        num_attention_heads=SAME,
        max_position_embeddings=SAME,
        vocab_size=SAME,
    ),
    numbers=hf_names(layernorm_epsilon="rms_norm_eps", init_method_std="initializer_range"),
    switches=hf_names(share_embeddings_and_output_weights="tie_word_embeddings"),
    needed=PLAIN,
    given={"hidden_act": ("silu", "swish")},
    written=dict(attention_dropout=0.0),
    absent=("attention_bias", "mlp_bias", "quantization_config", "compression_config"),
)
HEADS = Heads(optional=hf_names(num_query_groups="num_key_value_heads", kv_channels="head_dim"))
LLAMA_PARTS = (SHAPE, HEADS, RotaryPositions())

IN_A_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
OUTSIDE = {EMBEDDING: "model.embed_tokens.weight", "decoder.final_layernorm.weight": "model.norm.weight"}
OUTSIDE |= {OUTPUT: "lm_head.weight"}


WEIGHTS = WeightNames("model.layers", OUTSIDE, IN_A_LAYER)


def with_experts(module: str, gate: str, up: str, down: str) -> WeightNames:
    """Return Llama's weight names with a router and experts."""
    expert = f"{module}.experts.{{}}"
    return WEIGHTS.with_layer_names(
        {
            "mlp.router.weight": (f"{module}.gate.weight",),
            "mlp.experts.local_experts.{}.linear_fc1.weight": (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            "mlp.experts.local_experts.{}.linear_fc2.weight": (f"{expert}.{down}.weight",),
        }
    )


FAMILIES = (Family("llama", "LlamaForCausalLM", (*LLAMA_PARTS, NoWindow(), ATTENTION_BIAS), WEIGHTS),)
