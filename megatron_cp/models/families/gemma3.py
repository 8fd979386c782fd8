"""Gemma 3 text models: layers with and without a window."""

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
# Settings that all Gemma 3 models have and Llama's do not; the classes below read the others.
_LAYERS: dict[str, Any] = dict(
    activation_func="fast_gelu",
    layernorm_zero_centered_gamma=True,
    sandwich_norm=True,
    qk_layernorm=True,
    scale_embeddings=True,
)
_OTHER_SETTINGS = ("softmax_scale", "rotary_base_local", "window_attn_skip_freq")


@dataclass(frozen=True)
class WindowedLayers(LayerWindows):
    """Layers with a window, listed or every n-th without."""

    def check(self, values: Mapping[str, Any], problems: Problems) -> None:
        super().check(self._listed(values), problems)

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(self._listed(values), model, problems)

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        values = super().write(model, problems)
        if isinstance(model.window_attn_skip_freq, list):  # versions that ignore layer_types cannot express it
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
    """Rotary positions of layers without a window, which may be scaled, and with one."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        by_kind = _settings(values, "rope_parameters")
        rope = {"rope_theta": values.get("rope_theta", 1_000_000)} | _settings(values, "rope_scaling")
        super().read({"rope_parameters": rope | _settings(by_kind, _NO_WINDOW)}, model, problems)
        plain = model.position_embedding_type == "rope"
        problems.unless(plain, "rope_type", model.position_embedding_type, "must be default, linear or llama3")
        local = {"rope_theta": values.get("rope_local_base_freq", 10_000)} | _settings(by_kind, _WINDOW)
        kind, base = local.get("rope_type", "default"), local["rope_theta"]
        problems.unless(kind == "default", f"{_WINDOW}.rope_type", kind, "must be default")
        problems.unless(is_positive(base), "rope_local_base_freq", base, "must be a number above 0")
        if model.window_size is not None and is_positive(base):
            model.rotary_base_local = float(base)

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        values = super().write(model, problems)
        kind, base = model.position_embedding_type, model.rotary_base_local
        problems.unless(kind == "rope", NAME.model.position_embedding_type, kind, "must be rope")
        given = base is not None or model.window_size is None or values["rope_scaling"] is None
        message = "must be set if the positions of layers without a window are scaled"
        problems.unless(given, NAME.model.rotary_base_local, base, message)
        return values | {"rope_local_base_freq": base or float(values["rope_theta"])}


@dataclass(frozen=True)
class QueryScale(Settings):
    """Scale of attention scores, as the number whose square root divides them."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        scalar = values["query_pre_attn_scalar"]
        model.softmax_scale = None if scalar == model.kv_channels else scalar**-0.5

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        scale = model.softmax_scale
        scalar = model.kv_channels if scale is None else round(scale**-2)
        exact = scale is None or (scalar and scalar**-0.5 == scale)
        problems.unless(bool(exact), NAME.model.softmax_scale, scale, "must be 1 / sqrt(n) of a whole number n")
        return {"query_pre_attn_scalar": scalar}


_PARTS = (
    replace(
        SHAPE,
        needed={name: value for name, value in PLAIN.items() if name not in _OTHER_SETTINGS} | _LAYERS,
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
        WEIGHTS.with_layer_names(_NORMS),
        optional_features=(WINDOW,),
    ),
)


def _settings(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings under a name, or none."""
    inner = values.get(name)
    return inner if isinstance(inner, dict) else {}
