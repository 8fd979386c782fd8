"""Values that a recipe reads from environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_cp.common.terminal import hide

# Limit of interpolations of interpolated values, over all settings: enough for a recipe, too few for one whose text
# doubles at each step (3 ** (16 / 3) evaluations at most).
MOST_CHAINED = 16
_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)(?:,([^${}]*))?\}")
_REFERENCE = re.compile(r"\$\{(?:oc\.env:[^${}]*|([\w.]+))\}")


class FromEnvironment(str):
    """Text from an environment variable; ``repr`` shows the recipe's text.

    ``written`` is the recipe's text, such as ``${oc.env:HOME}/runs``.
    """

    written: str

    def __new__(cls, value: str, written: str) -> FromEnvironment:
        made = super().__new__(cls, value)
        made.written = written
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return FromEnvironment, (str(self), self.written)

    def __repr__(self) -> str:
        return repr(self.written)


def as_written(value: Any) -> Any:
    """Replace each :class:`FromEnvironment` in a value by the recipe's text."""
    if isinstance(value, FromEnvironment):
        return value.written
    if isinstance(value, Mapping):
        return {key: as_written(each) for key, each in value.items()}
    return [as_written(each) for each in value] if isinstance(value, list) else value


def substitute_environment(written: str) -> str:
    """Substitute environment variables in a recipe's text; unset ones stay as written."""
    text = _VARIABLE.sub(lambda found: _read(found[1]) or found[2] or found[0], written)
    return text if text == written else FromEnvironment(text, written)


def _read(name: str) -> str | None:
    value = os.environ.get(name)
    if value is not None:
        hide(value, f"${{oc.env:{name}}}")
    return value


@contextmanager
def record_reads() -> Iterator[list[str]]:
    """Collect the variables that interpolations read, and hide their values."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    names: list[str] = []

    def env(key: str, *default: Any) -> Any:
        names.append(str(key))
        _read(str(key))
        return oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield names
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def chained(values: Mapping[str, Any]) -> int:
    """Count the interpolations in ``values`` whose result may be interpolated in turn."""
    plain = {name for name, value in values.items() if not isinstance(value, list) and "${" not in str(value)}
    number = 0
    for text in _texts(values.values()):
        harmless = sum(match[1] is None or match[1] in plain for match in _REFERENCE.finditer(text))
        number += text.count("${") - harmless
    return number


def resolved(config: Any, names: list[str], by_value: tuple[str, ...]) -> Any:
    """Resolve an OmegaConf configuration to plain values.

    A text from an environment variable becomes a :class:`FromEnvironment`, except in the sections ``by_value``. Numbers
    and booleans become plain values, which are checked and compared.

    Args:
        names: the list that :func:`record_reads` yields.

    Raises:
        ValueError: a variable holds a list or mapping with texts; the argument is the setting's name.
        OmegaConfBaseException: a value cannot be resolved.
    """
    from omegaconf import OmegaConf

    def walk(node: Any, raw: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(raw, dict):
            return {key: inner(node, key, each, path) for key, each in raw.items()}
        return [inner(node, index, each, path) for index, each in enumerate(raw)]

    def inner(node: Any, key: Any, raw: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(raw, dict | list):
            return walk(node[key], raw, (*path, key))
        if not OmegaConf.is_interpolation(node, key):
            return raw
        before = len(names)
        value: Any = node[key]
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        if len(names) == before or (path[:1] and path[0] in by_value):
            return value
        if isinstance(value, dict | list) and any(True for _ in _texts([value])):
            raise ValueError(".".join(map(str, (*path, key))))
        return FromEnvironment(value, raw) if isinstance(value, str) else value

    return walk(config, OmegaConf.to_container(config, resolve=False), ())


def _texts(values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _texts(value.values())
        elif isinstance(value, list):
            yield from _texts(value)
