"""Build typed dataclasses from mappings; report unknown keys and wrong types."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_cp.common.errors import Violation
from megatron_cp.config.setting import facts_of


class _Mismatch(Exception):
    """A value of a wrong type; the argument describes the expected type."""


@cache
def hints(cls: type) -> dict[str, Any]:
    """Return field name -> resolved type of a dataclass."""
    resolved = get_type_hints(cls)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def field_paths(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings below a dataclass."""
    for name, kind in hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from field_paths(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield prefix + name


def kind_of(cls: type, path: str) -> Any:
    """Return the type of a setting by its dotted name; None if there is none."""
    kind: Any = cls
    for name in path.split("."):
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            kind = hints(kind).get(name) if dataclasses.is_dataclass(kind) else None  # type: ignore[arg-type]
    return kind


def section_names(cls: type) -> list[str]:
    """Return the fields of a dataclass that are dataclasses."""
    return [name for name, kind in hints(cls).items() if dataclasses.is_dataclass(kind)]


def nearest_first(name: str, candidates: Iterable[str]) -> list[str]:
    """Return all candidates, most similar to ``name`` first."""
    return sorted(candidates, key=lambda c: -difflib.SequenceMatcher(None, name, c).ratio())


def nearest(name: str, candidates: list[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for a similar candidate, else an empty text."""
    leaf = name.rpartition(".")[2]
    same_leaf = [c for c in candidates if c.rpartition(".")[2] == leaf and c != name]
    longer = [c for c in candidates if c.startswith(name)]
    found = same_leaf[:1] or longer[:1] or difflib.get_close_matches(name, candidates, n=1, cutoff=0.7)
    return f"; did you mean '{found[0]}'?" if found else ""


def describe(kind: Any) -> str:
    """Return a type as text: "int", "list of int or null", "one of 'gpt', 'hybrid'"."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is list:
        inner = describe(args[0])
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    if origin is dict:
        return f"mapping of str to {describe(args[1])}"
    if kind is float:
        return "finite number"
    return "mapping" if dataclasses.is_dataclass(kind) else kind.__name__


def _choices(kind: Any) -> Iterator[str]:
    """Yield the texts that a Literal allows, also inside a union."""
    for arg in get_args(kind):
        if isinstance(arg, str):
            yield arg
        else:
            yield from _choices(arg)


def alternatives(kind: Any) -> list[Any]:
    """Return the types without arguments: ``[int, list]`` of ``int | list[int]``."""
    if get_origin(kind) in (Union, types.UnionType):
        return [found for option in get_args(kind) for found in alternatives(option)]
    return [get_origin(kind) or kind]


def convert(value: Any, kind: Any) -> Any:
    """Convert ``value`` to ``kind``: int to float, scalar to a dict's text, else none.

    Raises:
        _Mismatch: the value does not have the type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        for option in args:
            try:
                return convert(value, option)
            except _Mismatch:
                continue
    elif origin is Literal:
        if value in [choice for choice in args if isinstance(value, type(choice))]:
            return args[args.index(value)]  # the choice itself, not a FromEnvironment
    elif origin is list:
        if isinstance(value, list | tuple):
            with suppress(_Mismatch):  # report the expected type of the whole list
                return [convert(v, args[0]) for v in value]
    elif origin is dict:
        if isinstance(value, dict):
            given = {str(k): v for k, v in value.items() if v is not None}  # null removes an entry of the recipe
            return {k: convert(str(v) if type(v) in (bool, int, float) else v, args[1]) for k, v in given.items()}
    elif kind is float:
        # Exclude nan and inf: comparisons in the rules would accept or misreport them.
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif (type(value) is kind and (kind is not int or _fits_64_bits(value))) or (
        kind is str and isinstance(value, str)
    ):
        return value
    raise _Mismatch(describe(kind))


def _fits_64_bits(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _bad_number(value: Any) -> str:
    """Return why a number, or one in a list, is invalid for every setting; else empty."""
    for number in value if isinstance(value, list) else [value]:
        if type(number) is int and not _fits_64_bits(number):
            return f"; {str(number)[:20]}... does not fit 64 bits"
        if type(number) is float and not math.isfinite(number):
            return f"; {number} is not finite"
    return ""


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Literal: "one of its choices",
    str: "a text",
    list: "a list, [VALUE, VALUE]",
    dict: "a mapping",
    type(None): "null",
}


def remedy(path: str, value: Any, kind: Any) -> str:
    """Return the fix for a wrong type: the likely value, or the valid types."""
    for guess in _guesses(value):
        try:
            convert(guess, kind)
        except _Mismatch:
            continue
        if isinstance(guess, str):
            return f"{path}=\"'{guess}'\""
        return f"{path}={str(guess).lower().replace(' ', '')}"
    words = _WORDS | {Literal: f"one of {', '.join(_choices(kind))}"}
    takes = [words[found] for found in words if found in alternatives(kind)]
    return f"set {path} to {' or '.join(takes)}{', or remove it' if value is None else ''}" if takes else ""


def _guesses(value: Any) -> Iterator[Any]:
    """Yield likely intended values for a value of a wrong type."""
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        yield int(value)
    if type(value) is int and value in (0, 1):
        yield bool(value)
    if type(value) in (int, float):
        yield [value]
        yield str(value)
    if isinstance(value, list) and all(type(part) in (int, float) for part in value):
        yield [int(part) if type(part) is float and part.is_integer() else part for part in value]
        yield ",".join(map(str, value))


def _unknown(path: str, value: Any, root: type) -> str:
    """Return the message for an unknown key; sections are compared first."""
    is_section = isinstance(value, dict) and bool(value)
    candidates = section_names(root) if is_section and "." not in path else list(field_paths(root))
    suggestion = nearest(path, candidates)
    if is_section and not suggestion:
        inside, value = next(iter(value.items()))
        return _unknown(f"{path}.{inside}", value, root)
    return f"unknown key '{path}'{suggestion}"


def build(
    cls: type, mapping: dict[str, Any], problems: list[Violation], root: type | None = None, prefix: str = ""
) -> Any:
    """Return an instance of a dataclass; append violations to ``problems``.

    Settings with violations keep their defaults.
    """
    root = root or cls
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        kind = hints(cls).get(key)
        if kind is None:
            fix = "'megatron-cp train --recipe NAME --print-config' lists every setting"
            problems.append(Violation("K1", "error", path, _unknown(path, value, root), fix))
        elif dataclasses.is_dataclass(kind) and isinstance(value, dict):
            values[key] = build(kind, value, problems, root, f"{path}.")  # type: ignore[arg-type]
        else:
            try:
                values[key] = convert(value, kind)
            except _Mismatch as expected:
                hint = nearest(value, list(_choices(kind))) if isinstance(value, str) else _bad_number(value)
                wanted = facts_of(cls)[key].expected or f"expected {expected}"
                fix = remedy(path, value, kind)
                problems.append(Violation("K2", "error", path, f"{wanted}, got {value!r}{hint}", fix))
    return cls(**values)
