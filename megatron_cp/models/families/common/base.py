"""A model family: its names, its settings in ``config.json`` and in :class:`ModelConfig`, its weights.

Both directions are exact or refused: nothing that would change what the model computes is left out or rounded.
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

# Settings of a model that distinguish families, the most important first.
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
# The largest padding unit that a published vocabulary is held against: any padding would be part of the softmax.
_VOCABULARY_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)


class Problems:
    """All that stands in the way."""

    def __init__(self, fix: str = "choose another model: this one has no counterpart") -> None:
        self._fix = fix
        self._found: list[Violation] = []

    def unless(self, holds: bool, field: str, value: Any, message: str) -> None:
        if not holds:
            self._found.append(Violation("", "error", field, message, self._fix, value))

    def tell(self) -> None:
        """Raises ConfigError where there is anything."""
        if self._found:
            raise ConfigError(self._found)


def is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


SAME = ""  # the name that it has in ModelConfig


def called(**names: str) -> dict[str, str]:
    """Settings of ModelConfig by the names that they have in ``config.json``."""
    return {name or own: own for own, name in names.items()}


@dataclass(frozen=True)
class Settings:
    """Settings that are converted together. Names are those of ``config.json`` where not said otherwise.

    counts: whole numbers of at least 1, and their names in ModelConfig: copied both ways. Without a name ("") they are
        only checked, and ``read`` and ``write`` convert them.
    optional: counts that may be null or absent.
    numbers: numbers above 0, and their names in ModelConfig.
    switches: true or false, and their names in ModelConfig; null is false.
    needed: settings of ModelConfig that have one value in these models. An import sets them, an export requires them.
    given: settings that have one value in these models. An import requires them where present, an export writes them.
        Of a tuple of equivalent values the first is written.
    written: settings that an export writes, and an import ignores.
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

    def concern(self, source: Mapping[str, Any] | ModelConfig) -> bool:
        """Whether the published or the own settings ``source`` are of a model that has these."""
        return True

    def copied(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the names of counts and numbers that ``values`` hold, and their names in ModelConfig."""
        return {**self.counts, **{name: own for name, own in self.optional.items() if values.get(name) is not None}}

    def check(self, values: Mapping[str, Any], problems: Problems) -> None:
        """Check types: not every version of Hugging Face's library does."""
        for name in self.copied(values):
            value = values.get(name)
            problems.unless(is_count(value), name, value, "a whole number of at least 1 is needed")
        for name in self.numbers:
            problems.unless(is_positive(values.get(name)), name, values.get(name), "a number above 0 is needed")

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        """Set what :class:`ModelConfig` has of these settings; ``values`` passed :meth:`check`."""
        for name, own in self._names().items():
            setattr(model, own, values.get(name))
        for name, own in self.switches.items():
            setattr(model, own, bool(values[name]))
        for own, value in self.needed.items():
            setattr(model, own, value)
        for name, value in self.given.items():
            equivalent = value if isinstance(value, tuple) else (value,)
            problems.unless(values.get(name, value) in equivalent, name, values.get(name), f"{equivalent[0]} is needed")
        for name in self.absent:
            problems.unless(not values.get(name), name, values.get(name), "there is no counterpart")

    def check_needed(self, model: ModelConfig, problems: Problems) -> None:
        for own, value in self.needed.items():
            problems.unless(getattr(model, own) == value, f"model.{own}", getattr(model, own), f"{value} is needed")

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        """Return what ``config.json`` says of these settings."""
        values = {name: getattr(model, own) for name, own in {**self._names(), **self.switches}.items()}
        given = {name: value[0] if isinstance(value, tuple) else value for name, value in self.given.items()}
        return values | given | dict(self.written)

    def _names(self) -> dict[str, str]:
        names = {**self.counts, **self.optional, **self.numbers}
        return {name: own for name, own in names.items() if own}


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of Hugging Face's library; see the package's docstring.

    may_have: features that its models may have. They always have those that a part needs or counts.
    marks: further settings, of which ``needed`` has a value that distinguishes it from families of the same features.
    """

    model_type: str
    architecture: str
    parts: tuple[Settings, ...]
    weights: WeightNames
    may_have: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def fits(self, model: ModelConfig) -> tuple[bool, ...]:
        """Whether a model of this family has what ``model`` has: its architecture, each feature, all marks."""
        needed = {own: value for part in self.parts for own, value in part.needed.items()}
        has = {own for part in self.parts for own in part.counts.values()} | {own for own in needed if needed[own]}
        features = {own for own in FEATURES if getattr(model, own)}
        if model.num_moe_experts is None:  # it has no router
            features.discard("moe_router_pre_softmax")
        either = (own in self.may_have or (own in features) == (own in has) for own in FEATURES)
        return (
            model.architecture == needed["architecture"],
            *either,
            all(getattr(model, own) == needed[own] for own in self.marks),
        )

    def counts(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the settings that count something in a published model of these settings, by both names."""
        return {name: own for part in self._of(values) for name, own in part.copied(values).items()}

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        """Return the settings of a published model.

        Raises:
            ConfigError: it has no counterpart; lists all reasons.
        """
        problems = Problems("the value that the model was published with")
        for part in self._of(values):
            part.check(values, problems)
        problems.tell()
        problems, model = Problems(), ModelConfig()
        for part in self._of(values):
            part.read(values, model, problems)
        model.make_vocab_size_divisible_by = next(n for n in _VOCABULARY_UNITS if values["vocab_size"] % n == 0)
        problems.tell()
        return model

    def check_needed(self, model: ModelConfig, problems: Problems) -> None:
        """Report the settings of ``model`` that no model of this family has."""
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
        return (part for part in self.parts if part.concern(source))


def _positions(model: ModelConfig) -> int | None:
    """The longest text that is declared: the training length where that is longer, but with YaRN (rule B13)."""
    if model.yarn_length is not None or model.seq_length is None:
        return model.yarn_length or model.max_position_embeddings
    return max(model.max_position_embeddings or 0, model.seq_length)
