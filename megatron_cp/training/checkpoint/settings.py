"""Type checks of the configuration saved in a checkpoint."""

from __future__ import annotations

import math
import reprlib
import types
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.schema import describe, hints
from megatron_cp.config.setting import facts_of


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # False for NaN


def problems_of_settings(config: dict[str, Any]) -> Iterator[str]:
    """Describe settings of a wrong type, and sizes below 1."""
    for section, kind in hints(RunConfig).items():
        value = config.get(section, {})
        if not is_dataclass(kind):
            if not _fits(value, kind):
                yield f"config.{section} is {short_repr(value)}, expected {describe(kind)}"
            continue
        if not isinstance(value, dict):
            yield f"config.{section} is {short_repr(value)}, expected a mapping"
            continue
        facts = facts_of(kind)
        for name, of in hints(kind).items():  # type: ignore[arg-type]
            if name in value and not _fits(value[name], of):
                yield f"config.{section}.{name} is {short_repr(value[name])}, expected {describe(of)}"
            elif facts[name].kind == "size" and not facts[name].allows(value.get(name)):
                yield f"config.{section}.{name} is {short_repr(value[name])}, expected an integer of at least 1"


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has a setting's type; saved choices may be outdated."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in args)
    if origin is Literal:
        return type(value) in {type(each) for each in args}
    if origin is list:
        return isinstance(value, list | tuple) and all(_fits(each, args[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, args[1]) for each in value.values())
    if kind is float:
        return is_number(value) or value in (math.inf, -math.inf)
    return kind is Any or type(value) is kind


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Add default values of settings that the saving version did not have."""
    filled = {
        name: default | config.get(name, {}) if isinstance(default, dict) else config.get(name, default)
        for name, default in asdict(RunConfig()).items()
    }
    return config | filled


def short_repr(value: Any) -> str:
    """Return a short representation of any value."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer with more digits than Python formats
        return "an integer with too many digits to show"
