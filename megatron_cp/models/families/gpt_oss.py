"""OpenAI's gpt-oss: attention sinks, windows, biased experts."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.models.families.common.base import WINDOW, Family, hf_names
from megatron_cp.models.families.common.positions import RotaryPositions
from megatron_cp.models.families.common.windows import LayerWindows
from megatron_cp.models.families.llama import HEADS, PLAIN, SHAPE, WEIGHTS
from megatron_cp.models.families.mistral import EXPERTS

_OTHER_SETTINGS = ("activation_func_clamp_value", "window_attn_skip_freq")
_SHAPE = replace(
    SHAPE,
    numbers={**SHAPE.numbers, **hf_names(activation_func_clamp_value="swiglu_limit")},
    needed={own: value for own, value in PLAIN.items() if own not in _OTHER_SETTINGS}
    | dict(
        activation_func="quick_gelu",  # x * sigmoid(1.702 x); 1.702 is swiglu_alpha
        glu_linear_offset=1.0,
        add_bias_linear=True,
        softmax_type="learnable",
    ),
    given={**SHAPE.given, "attention_bias": True, "swiglu_alpha": 1.702},
    absent=("quantization_config", "compression_config"),
)
# One tensor holds the first matrices of all experts, with rows in pairs of gate and up projection.
_EXPERT = "mlp.experts.local_experts.{}"
_WEIGHTS = WEIGHTS.with_layer_names(
    {
        "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
        "self_attention.core_attention.softmax_offset": ("self_attn.sinks",),
        "mlp.router.weight": ("mlp.router.weight",),
        "mlp.router.bias": ("mlp.router.bias",),
        f"{_EXPERT}.linear_fc1.weight": ("mlp.experts.gate_up_proj",),
        f"{_EXPERT}.linear_fc1.bias": ("mlp.experts.gate_up_proj_bias",),
        f"{_EXPERT}.linear_fc2.weight": ("mlp.experts.down_proj",),
        f"{_EXPERT}.linear_fc2.bias": ("mlp.experts.down_proj_bias",),
    }
)
FAMILIES = (
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        (_SHAPE, HEADS, RotaryPositions(), LayerWindows(), EXPERTS),
        _WEIGHTS,
        optional_features=(WINDOW,),
        marks=("softmax_type",),
    ),
)
