"""Compare the sizes in a published ``config.json`` with the weights, before anything of these sizes is made."""

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
    """Check that no size of ``config.json`` is beyond what weights of these names and shapes can have.

    Raises:
        ConfigError: with each setting that is too large, and what the weights have.
    """
    counts = FAMILIES[values["model_type"]].counts(values)
    layers, experts = _numbered(_LAYER, shapes), _numbered(_EXPERT, shapes)
    widest = max((size for shape in shapes.values() if 0 not in shape for size in shape), default=0)
    # All others are a factor of some tensor's dimension; of max_position_embeddings there is no tensor.
    limits = dict.fromkeys(counts, (widest, f"the weights' largest dimension is {widest}"))
    limits["num_hidden_layers"] = layers, f"the weights have {layers} layers"
    # Without numbered experts one tensor is of all of them, or they are missing, which the import reports.
    for name in (name for name, own in counts.items() if f"model.{own}" == NAME.model.num_moe_experts and experts):
        limits[name] = experts, f"the weights have {experts} experts in a layer"
    del limits["max_position_embeddings"]
    found = Problems("restore the published value, or fetch the weights again")
    for name, (most, what) in limits.items():
        value = values.get(name)
        found.unless(type(value) is not int or value <= most, name, value, what)
    found.raise_if_any()


def _numbered(pattern: re.Pattern[str], names: Mapping[str, Any]) -> int:
    """How many modules are numbered from 0 in the names of tensors."""
    return max((int(match[1][:9]) + 1 for name in names for match in pattern.finditer(name)), default=0)
