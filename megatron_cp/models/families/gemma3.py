"""Gemma 3, its text models: layers with a sliding window and without, each kind with rotary positions of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.base import WINDOW, Family, Problems, Settings, is_count, is_positive
from megatron_cp.models.families.common.positions import RotaryPositions
from megatron_cp.models.families.common.windows import LayerWindows
from megatron_cp.models.families.llama import ATTENTION_BIAS, HEADS, PLAIN, SHAPE, WEIGHTS

_WINDOW, _NO_WINDOW = "sliding_attention", "full_attention"
# What the layers of all Gemma 3 models have and those of Llama's do not; the parts below read the other settings.
_LAYERS: dict[str, Any] = dict(
    activation_func="fast_gelu",
    layernorm_zero_centered_gamma=True,
    sandwich_norm=True,
    qk_layernorm=True,
    scale_embeddings=True,
)
_READ_BELOW = ("softmax_scale", "rotary_base_local", "window_attn_skip_freq")


@dataclass(frozen=True)
class WindowedLayers(LayerWindows):
    """The layers with the window: ``layer_types``, or all but every n-th (``sliding_window_pattern``)."""

    def check(self, values: Mapping[str, Any], problems: Problems) -> None:
        super().check(self._listed(values), problems)

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(self._listed(values), model, problems)

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        values = super().write(model, problems)
        if isinstance(model.window_attn_skip_freq, list):  # versions that do not read layer_types have no counterpart
            return values
        every = model.window_attn_skip_freq or model.num_layers + 1
        return values | {"sliding_window_pattern": every if model.window_size else 1}

    @staticmethod
    def _listed(values: Mapping[str, Any]) -> Mapping[str, Any]:
        layers: Any = values.get("num_hidden_layers")
        every: Any = values.get("sliding_window_pattern", 6)
        if values.get("layer_types") is not None or not is_count(layers) or not is_count(every):
            return values
        kinds = [_WINDOW if layer % every else _NO_WINDOW for layer in range(1, layers + 1)]
        return {**values, "layer_types": kinds}


@dataclass(frozen=True)
class PositionsByWindow(RotaryPositions):
    """Rotary positions of layers without a window, which may be stretched, and those of layers with one."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        by_kind = _settings(values, "rope_parameters")
        rope = {"rope_theta": values.get("rope_theta", 1_000_000)} | _settings(values, "rope_scaling")
        super().read({"rope_parameters": rope | _settings(by_kind, _NO_WINDOW)}, model, problems)
        plain = model.position_embedding_type == "rope"
        problems.unless(plain, "rope_type", model.position_embedding_type, "default, linear or llama3 is needed")
        local = {"rope_theta": values.get("rope_local_base_freq", 10_000)} | _settings(by_kind, _WINDOW)
        kind, base = local.get("rope_type", "default"), local["rope_theta"]
        problems.unless(kind == "default", f"{_WINDOW}.rope_type", kind, "default is needed")
        problems.unless(is_positive(base), "rope_local_base_freq", base, "a number above 0 is needed")
        if model.window_size is not None and is_positive(base):
            model.rotary_base_local = float(base)

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        values = super().write(model, problems)
        kind, base = model.position_embedding_type, model.rotary_base_local
        problems.unless(kind == "rope", NAME.model.position_embedding_type, kind, "rope is needed")
        given = base is not None or model.window_size is None or values["rope_scaling"] is None
        message = "a base of layers with a window is needed, where the other layers' positions are stretched"
        problems.unless(given, NAME.model.rotary_base_local, base, message)
        return values | {"rope_local_base_freq": base or float(values["rope_theta"])}


@dataclass(frozen=True)
class QueryScale(Settings):
    """The scale of attention scores, as the number whose square root divides them."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        scalar = values["query_pre_attn_scalar"]
        model.softmax_scale = None if scalar == model.kv_channels else scalar**-0.5

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        scale = model.softmax_scale
        scalar = model.kv_channels if scale is None else round(scale**-2)
        exact = scale is None or (scalar and scalar**-0.5 == scale)
        problems.unless(bool(exact), NAME.model.softmax_scale, scale, "a whole number to the power of -0.5 is needed")
        return {"query_pre_attn_scalar": scalar}


_PARTS = (
    replace(
        SHAPE,
        needed={name: value for name, value in PLAIN.items() if name not in _READ_BELOW} | _LAYERS,
        given={"hidden_activation": "gelu_pytorch_tanh"},
        absent=(*SHAPE.absent, "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    ),
    HEADS,
    WindowedLayers(),
    PositionsByWindow(),
    QueryScale(numbers={"query_pre_attn_scalar": ""}),
    ATTENTION_BIAS,
)
_NORMS = {
    "self_attn_bda.norm.weight": ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("pre_feedforward_layernorm.weight",),
    "mlp_bda.norm.weight": ("post_feedforward_layernorm.weight",),
}
FAMILIES = (
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _PARTS,
        WEIGHTS.and_in_a_layer(_NORMS),
        may_have=(WINDOW,),
    ),
)


def _settings(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings that ``values`` hold under a name, or none."""
    inner = values.get(name)
    return inner if isinstance(inner, dict) else {}
