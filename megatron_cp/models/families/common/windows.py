"""Sliding windows in ``config.json``, which count the token itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.base import Problems, Settings, is_count


@dataclass(frozen=True)
class _Window(Settings):
    """Width of a window."""

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        window = model.window_size
        causal = window is None or (window[0] >= 0 and window[1] == 0)
        problems.unless(causal, NAME.model.window_size, window, "must be [n, 0]")
        return super().write(model, problems) | {"sliding_window": window[0] + 1 if window else None}


@dataclass(frozen=True)
class NoWindow(Settings):
    """No window, also if the settings have one: Hugging Face's library ignores them."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        asked = bool(values.get("use_sliding_window")) and values.get("sliding_window") is not None
        asked = asked or "sliding_attention" in str(values.get("layer_types"))
        problems.unless(not asked, "use_sliding_window", values.get("use_sliding_window"), "must be false")


@dataclass(frozen=True)
class SlidingWindow(_Window):
    """Window in all layers, or in none."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        width: Any = values.get("sliding_window")
        problems.unless(width is None or is_count(width), "sliding_window", width, "must be at least 1 or null")
        model.window_size = [width - 1, 0] if is_count(width) else None


@dataclass(frozen=True)
class SwitchedWindow(SlidingWindow):
    """Window that ``use_sliding_window`` switches on.

    It applies to layers from ``max_window_layers`` on, or to those of ``layer_types``.

    reads_first_layer: whether the family's models read ``max_window_layers``.
    """

    reads_first_layer: bool = True

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        width: Any = values.get("sliding_window")
        layers, used = values.get("layer_types"), bool(values.get("use_sliding_window")) and width is not None
        first = values.get("max_window_layers", 0) if self.reads_first_layer else 0
        have_window = [kind == "sliding_attention" for kind in layers or ()]
        have_window = have_window or [used and layer >= first for layer in range(model.num_layers)]
        if not any(have_window):
            return
        message = "must give all layers a window of at least 1 token"
        holds = used and all(have_window) and is_count(width)
        problems.unless(holds, "use_sliding_window", values.get("use_sliding_window"), message)
        model.window_size = [width - 1, 0] if holds else None

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        # Some versions ignore use_sliding_window and apply the window.
        switch = {"use_sliding_window": bool(model.window_size), "max_window_layers": 0}
        return super().write(model, problems) | switch


@dataclass(frozen=True)
class LayerWindows(_Window):
    """Window in the layers that ``layer_types`` lists as ``sliding_attention``."""

    def check(self, values: Mapping[str, Any], problems: Problems) -> None:
        super().check(values, problems)
        kinds: Any = values.get("layer_types")
        known = isinstance(kinds, list) and set(map(str, kinds)) <= {"sliding_attention", "full_attention"}
        known = known and len(kinds) == values.get("num_hidden_layers")
        message = "must list sliding_attention or full_attention for each layer"
        problems.unless(known, "layer_types", kinds, message)
        width: Any = values.get("sliding_window")
        unused = not (known and "sliding_attention" in kinds)
        message = "must be a whole number of at least 1"
        problems.unless(unused or is_count(width), "sliding_window", width, message)

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        sliding = [kind == "sliding_attention" for kind in values["layer_types"]]
        if not any(sliding):
            return
        model.window_size = [values["sliding_window"] - 1, 0]
        if not all(sliding):
            numbers = range(1, len(sliding) + 1)
            every = (n for n in numbers if sliding == [layer % n != 0 for layer in numbers])
            model.window_attn_skip_freq = next(every, [int(each) for each in sliding])

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        has_window = [model.layer_has_window(layer) for layer in range(1, model.num_layers + 1)]
        kinds = ["sliding_attention" if each else "full_attention" for each in has_window]
        return super().write(model, problems) | {"layer_types": kinds}
