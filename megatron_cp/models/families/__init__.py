"""Model families of Hugging Face's library: one file each, and their list.

To add a family, write a file like ``qwen.py`` and add it to ``_FILES``. The file lists ``FAMILIES``, each a
:class:`Family` of:

- ``model_type`` and ``architecture``, as in ``config.json``;
- ``parts``: settings in groups, each a :class:`Settings`. Reuse those of ``llama.py`` and of
  ``common/``. Counts, numbers and fixed values are declared (``counts``, ``optional``, ``numbers``, ``needed``,
  ``given``, ``written``, ``absent``). Other conversions are code in ``read`` (import) and ``write`` (export), which
  report unsupported values to ``problems``;
- ``weights``: the names of the tensors, as :class:`WeightNames`;
- ``optional_features``: those of :data:`FEATURES` that models may have; they always have what a group needs or counts;
- ``marks``: further settings whose value in ``needed`` distinguishes the family from others.

Differences in computation are settings of :class:`ModelConfig`, which the layer specs read. So recipes, rules and
checkpoints do not depend on families. Add a new setting of that kind to the ``needed`` of other families
(``llama.PLAIN``, ``nemotron_h.py``), so that they refuse to export other values.

The commands import, export and the size check need no change. Tests: a variant in
``tests/unit_tests/convert/published.py``, both directions and refusals in ``test_families.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families import deepseek, gemma3, gpt_oss, llama, mistral, nemotron_h, qwen
from megatron_cp.models.families.common.base import FEATURES, Family, Problems

_FILES = (llama, mistral, qwen, gemma3, deepseek, nemotron_h, gpt_oss)
# An export takes, of the families that fit, the first of those with most marks.
FAMILIES: dict[str, Family] = {family.model_type: family for file in _FILES for family in file.FAMILIES}


def model_from_hf(values: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Return the family and the settings of a published model.

    Args:
        values: ``config.json``, with Hugging Face's defaults filled in.

    Raises:
        ConfigError: the model is not supported; lists all reasons.
    """
    family = FAMILIES[values["model_type"]]
    return family, family.read(values)


def hf_from_model(model: ModelConfig, rows: int) -> tuple[Family, dict[str, Any]]:
    """Return the family that fits a model, and its ``config.json``.

    Args:
        rows: rows of the embedding, padding included: they are part of the softmax.

    Raises:
        ConfigError: no family fits; lists all reasons.
    """
    problems = Problems()
    family = max(FAMILIES.values(), key=lambda each: (each.fits(model), len(each.marks)))
    if not all(family.fits(model)):
        has = ", ".join(f"{name}={getattr(model, name)}" for name in reversed(FEATURES))
        problems.unless(False, "model", None, f"no model family has all of {has}")
        family.check_needed(model, problems)
    else:
        values = family.write(model, rows, problems)
    problems.raise_if_any()
    return family, values
