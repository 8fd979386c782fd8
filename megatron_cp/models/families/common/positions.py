"""Rotary positions in ``config.json``: plain, linear, Llama 3 or YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.base import Problems, Settings, is_count, is_positive
from megatron_cp.models.yarn import concentration

# Llama 3 scaling that megatron-core implements; the factor is free.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class RotaryPositions(Settings):
    """Rotary positions shared by all layers."""

    needed: Mapping[str, Any] = field(default_factory=lambda: dict(rotary_percent=1.0, rotary_interleaved=False))

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        rope: dict[str, Any] = {"rope_theta": values.get("rope_theta")}
        for name in ("rope_scaling", "rope_parameters"):
            given = values.get(name) or {}
            plain = isinstance(given, dict) and not any(isinstance(value, dict) for value in given.values())
            problems.unless(plain, name, given, "must be one set for all layers")
            rope |= given if plain else {}
        read_base(rope, model, problems)
        share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
        problems.unless(share == 1.0, "partial_rotary_factor", share, "must be 1")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        known = kind in ("default", "linear", "llama3", "yarn")
        problems.unless(known, "rope_type", kind, "must be default, linear, llama3 or yarn")
        if kind == "yarn":
            _read_yarn(rope, model, problems)
        if kind not in ("linear", "llama3"):
            return
        factor: Any = rope.get("factor")
        problems.unless(is_positive(factor), "rope_scaling.factor", factor, "must be a number above 0")
        factor = float(factor) if is_positive(factor) else 1.0
        if kind == "linear":
            model.seq_len_interpolation_factor = factor
            return
        model.rope_scaling, model.rope_scaling_factor = True, factor
        for name, value in _LLAMA3_ROPE.items():
            given = rope.get(name, value)
            problems.unless(given == value, f"rope_scaling.{name}", given, f"must be {value}, fixed in megatron-core")

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        kind = model.position_embedding_type
        problems.unless(kind in ("rope", "yarn"), NAME.model.position_embedding_type, kind, "must be rope or yarn")
        both = model.rope_scaling and model.seq_len_interpolation_factor is not None
        message = "cannot be combined with seq_len_interpolation_factor"
        problems.unless(not both, NAME.model.rope_scaling, True, message)
        # As megatron-core uses it: a whole number.
        return dict(rope_theta=int(model.rotary_base), rope_scaling=_rope_scaling(model))


def read_base(rope: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
    base = model.rotary_base if rope["rope_theta"] is None else rope["rope_theta"]
    whole = is_positive(base) and base == int(base)
    problems.unless(whole, "rope_theta", base, "must be a whole number above 0")
    model.rotary_base = float(base) if whole else model.rotary_base


def _read_yarn(rope: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
    """Read YaRN's settings, with the defaults of Hugging Face's library."""
    factor: Any = rope.get("factor")
    attention_factor: Any = rope.get("attention_factor")
    original: Any = rope.get("original_max_position_embeddings") or model.max_position_embeddings
    fast, slow = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
    numbers = {"factor": factor, "beta_fast": fast, "beta_slow": slow}
    numbers |= {} if attention_factor is None else {"attention_factor": attention_factor}
    for name, value in numbers.items():
        problems.unless(is_positive(value), f"rope_scaling.{name}", value, "must be a number above 0")
    name, message = "rope_scaling.original_max_position_embeddings", "must be a whole number from 1 to 2**31"
    is_length = is_count(original) and original <= 2**31
    problems.unless(is_length, name, original, message)
    if not is_length or not all(map(is_positive, numbers.values())):
        return
    # An attention factor becomes a multiple of the scaling factor's logarithm, which is 0 for a factor of 1.
    stretches = factor > 1 or (factor == 1 and attention_factor in (None, 1))
    problems.unless(stretches, "rope_scaling.factor", factor, "must be a number above 1")
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
        if not model.yarn_correction_range_round_to_int:  # true is the default; older versions refuse the setting
            scaling["truncate"] = False
        if model.yarn_mscale and model.yarn_mscale_all_dim:
            return scaling | {"mscale": model.yarn_mscale, "mscale_all_dim": model.yarn_mscale_all_dim}
        # Hugging Face's library ignores zeros.
        default = model.yarn_mscale is None or model.yarn_mscale_all_dim is None
        return scaling | ({} if default else {"attention_factor": concentration(model)})
    if model.rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3_ROPE}
    if model.seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": model.seq_len_interpolation_factor}
    return None
