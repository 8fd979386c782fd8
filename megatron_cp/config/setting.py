"""What is known of a setting, on the field that declares it. Pure.

A setting is one field of a dataclass::

    moe_router_topk: int = size(2, "experts that a token is sent to", FUNCTION, when=EXPERTS)

Everything else is read from these declarations: the rules of ranges and of settings without effect, what a checkpoint
must agree on, what a model on one rank sets back, the flags of the commands, what is passed on to megatron-core, and
the page of settings. A field that megatron-core's own configuration has under the same name is passed on as it is,
unless it is ``translated``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.overrides import typed

# What a setting decides. A checkpoint that is gone on from must agree on all but the layout, which may change.
WEIGHTS = "weights"  # which there are
FUNCTION = "function"  # what else the model computes with them: it may begin with those of another function
OPTIMIZER = "optimizer"  # whose state it is
SCHEDULE = "schedule"  # learning rate and weight decay of a step
DATA = "data"  # samples, their order, and what of them is learnt
LAYOUT = "layout"  # how the work is divided, how memory is saved, with which kernels: none of it makes another model

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class When:
    """When a setting is read: the test of a finalized run, what decides it in words, and what to type for it."""

    switch: str
    holds: Callable[[Any], bool]
    turn_on: str


@dataclass(frozen=True)
class Facts:
    """What is known of a setting beside its type and default.

    least, most: the range; of kind "positive" ``least`` itself is not in it, of kind "share" ``most`` is not.
    flags: of the command line.
    expected: of a wrong type, in upstream's words.
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
        """Whether a value is in the range; what is no number always is."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        above = value > self.least if self.kind == "positive" else value >= self.least
        return above and (value < self.most if self.kind == "share" else value <= self.most)


def setting(
    default: Any, help: str, *affects: str, when: When | tuple[When, ...] = (), flags: str = "", **facts: Any
) -> Any:
    """A field of a section, with its facts; ``flags`` are separated by blanks."""
    whens = when if isinstance(when, tuple) else (when,)
    known = {"setting": Facts(help, affects, when=whens, flags=tuple(flags.split()), **facts)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=known)
    return dataclasses.field(default=default, metadata=known)


def size(default: int | None, help: str, *affects: str, **facts: Any) -> Any:
    """A size or a count: at least 1, and no larger than anything that exists (rule A1)."""
    return setting(default, help, *affects, kind="size", least=1, most=LARGEST, **facts)


def positive(default: float | None, help: str, *affects: str, **facts: Any) -> Any:
    """An interval, a time, a threshold or a scale: above 0 (rule K51)."""
    return setting(default, help, *affects, kind="positive", least=0, **facts)


def share(default: float, help: str, *affects: str, **facts: Any) -> Any:
    """A probability or a fraction: at least 0, less than 1 (rule K16)."""
    return setting(default, help, *affects, kind="share", least=0, most=1, **facts)


def facts_of(section: Any) -> dict[str, Facts]:
    """The facts of all settings of a section, by name; ``section`` is its class."""
    return {field.name: field.metadata.get("setting", Facts()) for field in dataclasses.fields(section)}


def equals(setting: str, *values: Any) -> When:
    """Read where a setting has one of these values."""
    shown = " or ".join(typed(setting, value).partition("=")[2] for value in values)
    return When(f"{setting}={shown}", lambda run: run.value_at(setting) in values, typed(setting, values[0]))


def given(setting: str, example: Any) -> When:
    """Read where a setting is not null; ``example`` is a value that it may have."""
    return When(setting, lambda run: run.value_at(setting) is not None, typed(setting, example))


def counted(setting: str, example: int) -> When:
    """Read where a number is neither null nor 0."""
    return When(setting, lambda run: bool(run.value_at(setting)), typed(setting, example))


def either(*whens: When) -> When:
    """Read where one of these holds."""
    return When(
        " or ".join(each.switch for each in whens),
        lambda run: any(each.holds(run) for each in whens),
        ", or ".join(each.turn_on for each in whens),
    )


def passed_on(section: Any, upstream: Iterable[str]) -> dict[str, Any]:
    """The values that go to megatron-core as they are; ``upstream`` are its names."""
    known = set(upstream)
    return {
        name: getattr(section, name)
        for name, facts in facts_of(type(section)).items()
        if name in known and not facts.translated
    }
