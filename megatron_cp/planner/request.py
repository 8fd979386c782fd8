"""Arguments of ``megatron-cp plan``: model, batch and environment. Pure."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from typing import Any

import yaml

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import list_models
from megatron_cp.config.schema import nearest_first
from megatron_cp.estimate.device import Device
from megatron_cp.models.vocabulary import known_vocab_size
from megatron_cp.rules.environment import PRESETS, Environment
from megatron_cp.rules.remedies import Case

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_CAPABILITIES = (("a100", 8.0), ("b", 10.0), ("gb", 10.0))  # by prefix of the GPU's name; default: Hopper


@dataclass(frozen=True)
class Amount:
    """A number of samples or of tokens."""

    number: int
    tokens: bool


def amount(text: str) -> Amount:
    """Parse ``512`` (samples), ``4M`` (tokens) or ``4194304 tokens``.

    K, M and G are powers of 1024.

    Raises:
        ValueError: the text has another form.
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMG]?)\s*(tokens?|samples?)?\s*", text, re.IGNORECASE)
    number = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if not found or number < 1 or not number.is_integer():
        raise ValueError(f"{text!r} is not a number of samples or tokens")
    unit = (found[3] or "").lower()
    return Amount(int(number), unit.startswith("token") or (bool(found[2]) and not unit))


def samples(batch: Amount, length: float) -> int:
    """Return the samples of a global batch.

    length: mean tokens per sample.
    """
    return max(1, round(batch.number / length)) if batch.tokens else batch.number


def model_recipe(name: str) -> dict[str, Any]:
    """Return a recipe for a published model.

    Raises:
        ConfigError: unknown model; the fix is the most similar name.
    """
    known = {_normalized(model): model for model in list_models()}
    if (found := known.get(_normalized(name))) is None:
        near = known[nearest_first(_normalized(name), known)[0]]
        models = ", ".join(known.values())
        raise ConfigError(f"--model {name}: unknown model; use {models}, or a folder. Fix: --model {near}")
    return {"defaults": [{"pretrain": "llama"}, {"model": found}, "_self_"]}


def _normalized(name: str) -> str:
    """Normalize a model's name: ``meta-llama/Llama-3.1-8B`` becomes ``llama318b``."""
    return re.sub(r"[^a-z0-9]|^meta|^nvidia", "", name.rpartition("/")[2].lower())


def check_vocabulary(case: Case) -> None:
    """Raise ConfigError if only a tokenizer's file has the vocabulary size."""
    if known_vocab_size(case.config.model, case.config.tokenizer) is None:
        name = NAME.model.vocab_size
        raise ConfigError(f"{name}=null: a plan needs the tokenizer's vocabulary size. Fix: {name}=128256")


def environment_of(device: Device, gpus_per_node: int) -> Environment:
    """Return the environment for the rules: these GPUs, all packages installed."""
    if device.name.startswith("cpu"):
        return PRESETS["cpu"]
    found = [capability for name, capability in _CAPABILITIES if device.name.lower().startswith(name)]
    return replace(
        PRESETS["gpu"],
        gpus_per_node=gpus_per_node,
        compute_capability=found[0] if found else 9.0,
        gpu_memory_gib=device.memory / 2**30,
    )


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert settings by section to dotted names."""
    sections = {section: values for section, values in settings.items() if isinstance(values, dict)}
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def laid_over(recipe: dict[str, Any], settings: dict[str, Any], gpus: int) -> str:
    """Return the YAML text of a recipe with ``settings`` merged over it."""
    recipe = copy.deepcopy(recipe) | {"recipe_world_size": gpus}
    for name, value in settings.items():
        section, _, setting = name.partition(".")
        recipe.setdefault(section, {})[setting] = value
    return yaml.safe_dump(recipe, sort_keys=False)
