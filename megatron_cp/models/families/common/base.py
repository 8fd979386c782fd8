"""Model families: names, settings on both sides, weights.

Both directions are exact or refused: nothing that changes the computation is left out or rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_cp.common.errors import ConfigError, Violation
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.weights import WeightNames

# Settings of a model that distinguish families, most important first.
WINDOW = NAME.model.window_size.removeprefix("model.")
FEATURES = (
    "multi_latent_attention",
    "moe_router_pre_softmax",
    "num_moe_experts",
    "sandwich_norm",
    WINDOW,
    "qk_layernorm",
    "add_qkv_bias",
)
# Largest padding unit that may divide a published vocabulary: no padding is added, which would enter the softmax.
_VOCABULARY_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)


class Problems:
    """Collected violations of one conversion."""

    def __init__(self, fix: str = "choose another model; this one is not supported") -> None:
        self._fix = fix
        self._found: list[Violation] = []

    def unless(self, holds: bool, field: str, value: Any, message: str) -> None:
        if not holds:
            self._found.append(Violation("", "error", field, message, self._fix, value))

    def raise_if_any(self) -> None:
        """Raise ConfigError with all violations, if there are any."""
        if self._found:
            raise ConfigError(self._found)


def is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


SAME = ""  # same name in ModelConfig


def hf_names(**names: str) -> dict[str, str]:
    """Map names in ``config.json`` to names in ModelConfig, from ``own="published"``."""
    return {name or own: own for own, name in names.items()}


@dataclass(frozen=True)
class Settings:
    """Group of settings that are converted together, by published name.

    counts: whole numbers of at least 1, and their names in ModelConfig: copied both ways. With an empty name they are
        only checked; ``read`` and ``write`` convert them.
    optional: counts that may be null or absent.
    numbers: numbers above 0, and their names in ModelConfig.
    switches: true or false, and their names in ModelConfig; null is false.
    needed: settings of ModelConfig with a fixed value in these models: an import sets them, an export requires them.
    given: published settings with a fixed value: an import requires them if present, an export writes them. An export
        writes the first of a tuple of equivalent values.
    written: settings that an export writes and an import ignores.
    absent: settings that an import requires to be absent, null or false.
    """

    counts: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    needed: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    def applies_to(self, source: Mapping[str, Any] | ModelConfig) -> bool:
        """Return whether a model with these published or own settings has this group."""
        return True

    def copied(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Map the names of counts that ``values`` has to names in ModelConfig."""
        return {**self.counts, **{name: own for name, own in self.optional.items() if values.get(name) is not None}}

    def check(self, values: Mapping[str, Any], problems: Problems) -> None:
        """Check types, which not every version of Hugging Face's library does."""
        for name in self.copied(values):
            value = values.get(name)
            problems.unless(is_count(value), name, value, "must be a whole number of at least 1")
        for name in self.numbers:
            problems.unless(is_positive(values.get(name)), name, values.get(name), "must be a number above 0")

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        """Set these settings of :class:`ModelConfig`; ``values`` passed :meth:`check`."""
        for name, own in self._names().items():
            setattr(model, own, values.get(name))
        for name, own in self.switches.items():
            setattr(model, own, bool(values[name]))
        for own, value in self.needed.items():
            setattr(model, own, value)
        for name, value in self.given.items():
            equivalent = value if isinstance(value, tuple) else (value,)
            problems.unless(values.get(name, value) in equivalent, name, values.get(name), f"must be {equivalent[0]}")
        for name in self.absent:
            problems.unless(not values.get(name), name, values.get(name), "not supported")

    def check_needed(self, model: ModelConfig, problems: Problems) -> None:
        for own, value in self.needed.items():
            problems.unless(getattr(model, own) == value, f"model.{own}", getattr(model, own), f"must be {value}")

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        """Return these settings as in ``config.json``."""
        values = {name: getattr(model, own) for name, own in {**self._names(), **self.switches}.items()}
        given = {name: value[0] if isinstance(value, tuple) else value for name, value in self.given.items()}
        return values | given | dict(self.written)

    def _names(self) -> dict[str, str]:
        names = {**self.counts, **self.optional, **self.numbers}
        return {name: own for name, own in names.items() if own}


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of Hugging Face's library; see the package's docstring.

    optional_features: features that models may have. They always have those that a group needs or counts.
    marks: further settings whose value in ``needed`` distinguishes the family from others of the same features.
    """

    model_type: str
    architecture: str
    parts: tuple[Settings, ...]
    weights: WeightNames
    optional_features: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def fits(self, model: ModelConfig) -> tuple[bool, ...]:
        """Return matches with a model: architecture, each feature, all marks."""
        needed = {own: value for part in self.parts for own, value in part.needed.items()}
        has = {own for part in self.parts for own in part.counts.values()} | {own for own in needed if needed[own]}
        features = {own for own in FEATURES if getattr(model, own)}
        if model.num_moe_experts is None:  # no router
            features.discard("moe_router_pre_softmax")
        either = (own in self.optional_features or (own in features) == (own in has) for own in FEATURES)
        return (
            model.architecture == needed["architecture"],
            *either,
            all(getattr(model, own) == needed[own] for own in self.marks),
        )

    def counts(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Map the names of all counts in these published settings to names in ModelConfig."""
        return {name: own for part in self._of(values) for name, own in part.copied(values).items()}

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        """Convert published settings.

        Raises:
            ConfigError: the model is not supported; lists all reasons.
        """
        problems = Problems("restore the published value")
        for part in self._of(values):
            part.check(values, problems)
        problems.raise_if_any()
        problems, model = Problems(), ModelConfig()
        for part in self._of(values):
            part.read(values, model, problems)
        model.make_vocab_size_divisible_by = next(n for n in _VOCABULARY_UNITS if values["vocab_size"] % n == 0)
        problems.raise_if_any()
        return model

    def check_needed(self, model: ModelConfig, problems: Problems) -> None:
        """Report the settings of ``model`` that this family does not have."""
        for part in self._of(model):
            part.check_needed(model, problems)

    def write(self, model: ModelConfig, rows: int, problems: Problems) -> dict[str, Any]:
        """Return ``config.json`` of a model that fits; ``rows`` are the embedding's."""
        self.check_needed(model, problems)
        values: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for part in self._of(model):
            values |= part.write(model, problems)
        return values | dict(vocab_size=rows, max_position_embeddings=_positions(model))

    def _of(self, source: Mapping[str, Any] | ModelConfig) -> Iterator[Settings]:
        return (part for part in self.parts if part.applies_to(source))


def _positions(model: ModelConfig) -> int | None:
    """Return the declared length: the training length if that is longer."""
    if model.yarn_length is not None or model.seq_length is None:
        return model.yarn_length or model.max_position_embeddings
    return max(model.max_position_embeddings or 0, model.seq_length)
