"""Model families of Hugging Face's library: one file each, and the list of them.

To add a family, write a file like ``qwen.py`` and name it in ``_FILES``. The file lists ``FAMILIES``, each a
:class:`Family` of:

- ``model_type`` and ``architecture``, as in ``config.json``;
- ``parts``: its settings, each group a :class:`Settings`. Reuse those of ``llama.py`` and of
  ``common/``. Counts, numbers and fixed values are declared (``counts``, ``optional``, ``numbers``, ``needed``,
  ``given``, ``written``, ``absent``). What takes more than a renaming is code in ``read`` (import) and ``write``
  (export). Both report to ``problems`` what has no counterpart: those are the family's own rules;
- ``weights``: the names of its tensors, as :class:`WeightNames`;
- ``may_have``: the features of :data:`FEATURES` that its models may have; those that a part needs or counts they have;
- ``marks``: further settings of which ``needed`` has a value that distinguishes the family from the others.

What its layers compute otherwise is a setting of :class:`ModelConfig`, which the layer specs read. So recipes, rules
and checkpoints do not depend on families. A new setting of that kind belongs in the ``needed`` of the other families'
parts (``llama.PLAIN``, ``nemotron_h.py``): with another value they refuse the export.

The commands import, export and the size check need nothing else. Tests: a variant in
``tests/unit_tests/convert/published.py``, both directions and refusals in ``test_families.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families import deepseek, gemma3, gpt_oss, llama, mistral, nemotron_h, qwen
from megatron_cp.models.families.common.base import FEATURES, Family, Problems

_FILES = (llama, mistral, qwen, gemma3, deepseek, nemotron_h, gpt_oss)
# Of several that compute what a model does, an export takes the one with most marks, and of those the first.
FAMILIES: dict[str, Family] = {family.model_type: family for file in _FILES for family in file.FAMILIES}


def model_from_hf(values: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Return the family and the settings of a published model.

    Args:
        values: its ``config.json``, with Hugging Face's own defaults filled in.

    Raises:
        ConfigError: it computes something that this package's models do not; lists all of it.
    """
    family = FAMILIES[values["model_type"]]
    return family, family.read(values)


def hf_from_model(model: ModelConfig, rows: int) -> tuple[Family, dict[str, Any]]:
    """Return the family that computes what a model does, and its ``config.json``, in the form that all versions read.

    Args:
        rows: of the embedding, padding included: they are part of the softmax.

    Raises:
        ConfigError: no family computes that; lists all that stands in the way.
    """
    problems = Problems()
    family = max(FAMILIES.values(), key=lambda each: (each.fits(model), len(each.marks)))
    if not all(family.fits(model)):
        has = ", ".join(f"{name}={getattr(model, name)}" for name in reversed(FEATURES))
        problems.unless(False, "model", None, f"no family has all of {has}")
        family.check_needed(model, problems)
    else:
        values = family.write(model, rows, problems)
    problems.tell()
    return family, values
