"""Metadata of settings, declared on the field of the setting. Pure.

A setting is one field of a dataclass::

    moe_router_topk: int = size(2, "experts per token", FUNCTION, when=EXPERTS)

These declarations are the only source for the rules on ranges and on unused settings, for the settings that a
checkpoint compares, for the single-rank configuration, the commands' flags, megatron-core's configuration and the
settings page. A field that megatron-core's configuration has under the same name is passed on, unless it is
``translated``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.overrides import typed

# Effects of a setting. To resume from a checkpoint, all must match except the layout.
WEIGHTS = "weights"  # names and shapes of the weights
FUNCTION = "function"  # computation with the weights; weights of another function may be loaded as pretrained
OPTIMIZER = "optimizer"  # the optimizer's state
SCHEDULE = "schedule"  # learning rate and weight decay per step
DATA = "data"  # samples, their order, and the loss mask
LAYOUT = "layout"  # parallelism, memory and kernels: the model stays the same

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class When:
    """A condition under which a setting is read: text, test on a run, and fix."""

    switch: str
    holds: Callable[[Any], bool]
    turn_on: str


@dataclass(frozen=True)
class Facts:
    """Metadata of a setting besides type and default.

    least, most: range. Kind "positive" excludes ``least``; kind "share" excludes ``most``.
    flags: command-line flags.
    expected: upstream's message for a wrong type.
    """

    help: str = ""
    affects: tuple[str, ...] = ()
    kind: str = "number"
    least: float = -math.inf
    most: float = math.inf
    when: tuple[When, ...] = ()
    flags: tuple[str, ...] = ()
    translated: bool = False
    expected: str = ""

    def allows(self, value: Any) -> bool:
        """Return whether a value is in range; values that are not numbers always are."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        above = value > self.least if self.kind == "positive" else value >= self.least
        return above and (value < self.most if self.kind == "share" else value <= self.most)


def setting(
    default: Any, help: str, *affects: str, when: When | tuple[When, ...] = (), flags: str = "", **facts: Any
) -> Any:
    """Return a field with its metadata; ``flags`` are separated by spaces."""
    whens = when if isinstance(when, tuple) else (when,)
    known = {"setting": Facts(help, affects, when=whens, flags=tuple(flags.split()), **facts)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=known)
    return dataclasses.field(default=default, metadata=known)


def size(default: int | None, help: str, *affects: str, **facts: Any) -> Any:
    """Return a field for a size or count: at least 1, at most 2**31 - 1 (rule A1)."""
    return setting(default, help, *affects, kind="size", least=1, most=LARGEST, **facts)


def positive(default: float | None, help: str, *affects: str, **facts: Any) -> Any:
    """Return a field for an interval, time, threshold or scale: above 0 (rule K51)."""
    return setting(default, help, *affects, kind="positive", least=0, **facts)


def share(default: float, help: str, *affects: str, **facts: Any) -> Any:
    """Return a field for a probability or fraction: at least 0, below 1 (rule K16)."""
    return setting(default, help, *affects, kind="share", least=0, most=1, **facts)


def facts_of(section: Any) -> dict[str, Facts]:
    """Return name -> metadata of all settings of a section class."""
    return {field.name: field.metadata.get("setting", Facts()) for field in dataclasses.fields(section)}


def equals(setting: str, *values: Any) -> When:
    """Return the condition that a setting has one of these values."""
    shown = " or ".join(typed(setting, value).partition("=")[2] for value in values)
    return When(f"{setting}={shown}", lambda run: run.value_at(setting) in values, typed(setting, values[0]))


def given(setting: str, example: Any) -> When:
    """Return the condition that a setting is not null; ``example`` is a valid value."""
    return When(setting, lambda run: run.value_at(setting) is not None, typed(setting, example))


def counted(setting: str, example: int) -> When:
    """Return the condition that a number is neither null nor 0."""
    return When(setting, lambda run: bool(run.value_at(setting)), typed(setting, example))


def either(*whens: When) -> When:
    """Return the condition that at least one condition holds."""
    return When(
        " or ".join(each.switch for each in whens),
        lambda run: any(each.holds(run) for each in whens),
        ", or ".join(each.turn_on for each in whens),
    )


def passed_on(section: Any, upstream: Iterable[str]) -> dict[str, Any]:
    """Return the values passed to megatron-core unchanged.

    ``upstream`` are megatron-core's field names.
    """
    known = set(upstream)
    return {
        name: getattr(section, name)
        for name, facts in facts_of(type(section)).items()
        if name in known and not facts.translated
    }
