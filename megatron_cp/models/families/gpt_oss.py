"""OpenAI's gpt-oss: attention sinks, windows in every other layer, experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.models.families.common.base import WINDOW, Family, called
from megatron_cp.models.families.common.positions import RotaryPositions
from megatron_cp.models.families.common.windows import LayerWindows
from megatron_cp.models.families.llama import HEADS, PLAIN, SHAPE, WEIGHTS
from megatron_cp.models.families.mistral import EXPERTS

_READ_BELOW = ("activation_func_clamp_value", "window_attn_skip_freq")
_SHAPE = replace(
    SHAPE,
    numbers={**SHAPE.numbers, **called(activation_func_clamp_value="swiglu_limit")},
    needed={own: value for own, value in PLAIN.items() if own not in _READ_BELOW}
    | dict(
        activation_func="quick_gelu",  # x * sigmoid(1.702 x), and so is swiglu_alpha
        glu_linear_offset=1.0,
        add_bias_linear=True,
        softmax_type="learnable",
    ),
    given={**SHAPE.given, "attention_bias": True, "swiglu_alpha": 1.702},
    absent=("quantization_config", "compression_config"),
)
# The first matrices of all experts are one tensor, their rows in pairs of gate and what it gates; and so are others.
_EXPERT = "mlp.experts.local_experts.{}"
_WEIGHTS = WEIGHTS.and_in_a_layer(
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
        may_have=(WINDOW,),
        marks=("softmax_type",),
    ),
)
