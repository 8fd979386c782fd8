"""Compare sizes in a published ``config.json`` with the weights before allocation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.models.families import FAMILIES
from megatron_cp.models.families.common.base import Problems

# Numbered modules in the names of tensors.
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def check_sizes(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that no size in ``config.json`` is too large for the weights.

    Raises:
        ConfigError: lists each setting that is too large, and the size of the weights.
    """
    counts = FAMILIES[values["model_type"]].counts(values)
    layers, experts = _numbered(_LAYER, shapes), _numbered(_EXPERT, shapes)
    widest = max((size for shape in shapes.values() if 0 not in shape for size in shape), default=0)
    # Every other size is a factor of some tensor's dimension; max_position_embeddings is of none.
    limits = dict.fromkeys(counts, (widest, f"the weights' largest dimension is {widest}"))
    limits["num_hidden_layers"] = layers, f"the weights have {layers} layers"
    # Without numbered experts, one tensor has all of them, or the import reports them as missing.
    for name in (name for name, own in counts.items() if f"model.{own}" == NAME.model.num_moe_experts and experts):
        limits[name] = experts, f"the weights have {experts} experts in a layer"
    del limits["max_position_embeddings"]
    found = Problems("the published value, or download the weights again")
    for name, (most, what) in limits.items():
        value = values.get(name)
        found.unless(type(value) is not int or value <= most, name, value, what)
    found.raise_if_any()


def _numbered(pattern: re.Pattern[str], names: Mapping[str, Any]) -> int:
    """Return the number of modules in numbered tensor names."""
    return max((int(match[1][:9]) + 1 for name in names for match in pattern.finditer(name)), default=0)
