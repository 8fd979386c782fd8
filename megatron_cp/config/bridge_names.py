"""Settings of Megatron-Bridge and megatron-core that are no settings here. Pure.

A configuration for Bridge may keep settings that are off, or that have the only supported value: they are removed from
the run's configuration. All others are errors with a fix. The names are data, in ``bridge_names.yaml``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_cp.common.errors import Violation
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import settings as our_settings

_REMOVE = "remove it"
_SWITCHED_OFF: tuple[Any, ...] = (None, False, 0, "", "none", [])
_PRECISION_OF = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


class Meaning(NamedTuple):
    """The meaning of an upstream setting.

    ``accepted`` are the values without effect; None: any. ``setting`` is our equivalent setting.
    """

    message: str
    fix: str
    accepted: tuple[Any, ...] | None
    setting: str | None = None
    renamed: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether a value has no effect; for a mapping, whether all its values do."""
        if isinstance(value, dict):
            return all(self.accepts(inner) for inner in value.values())
        return self.accepted is None or any(_same(value, each) for each in self.accepted)


class Names(NamedTuple):
    """Contents of ``bridge_names.yaml``: meanings by setting and by section."""

    settings: dict[str, Meaning]
    sections: dict[str, Meaning]


@cache
def names() -> Names:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table = yaml.load(Path(__file__).with_suffix(".yaml").read_bytes(), loader)
    sections = {name: _absent(group) for name, group in table["sections"].items()}
    return Names(dict(_settings(table)), sections)


def _settings(table: dict[str, Any]) -> Iterator[tuple[str, Meaning]]:
    for name, entry in table["called"].items():
        entry = {"setting": entry} if isinstance(entry, str) else entry
        setting = entry["setting"]
        fix = entry.get("type", f"{setting}=VALUE")
        yield name, Meaning(f"named '{setting}' here", fix, (None, *entry.get("accepted", ())), setting, renamed=True)
    for name, entry in table["always"].items():
        values = entry["values"] if isinstance(entry, dict) else entry
        fix = entry["type"] if isinstance(entry, dict) else _REMOVE
        shown = str(values[0]).lower() if isinstance(values[0], bool) else values[0]
        yield name, Meaning(f"only {shown} is supported", fix, (None, *values))
    for group in table["not_supported"]:
        yield from _each_of(group, _absent(group))
    fix = "mixed_precision=bf16_mixed, or mixed_precision=fp16_mixed, or mixed_precision=fp32"
    precision = Meaning("set mixed_precision instead", fix, (None,), "mixed_precision")
    yield from _each_of(table["precision"], precision)
    yield from _each_of(table["without_effect"], Meaning("", "", None))


def _absent(group: dict[str, Any]) -> Meaning:
    accepted = (*_SWITCHED_OFF, *group.get("accepted", ()))
    return Meaning(f"not supported: {group['why']}", group.get("type", _REMOVE), accepted)


def _each_of(group: dict[str, Any], meaning: Meaning) -> Iterator[tuple[str, Meaning]]:
    for section, words in group.items():
        if section not in ("why", "type", "accepted"):
            yield from ((f"{section}.{name}", meaning) for name in words.split())


def _same(value: Any, other: Any) -> bool:
    # True is not 1, as in the schema.
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


_TE = f"{NAME.model.attention_backend}=te env_vars.{{}}=0 (disables the other kernel)"
# megatron-core's values that choose a kernel of Transformer Engine.
_BACKENDS = {
    "flash": _TE.format("NVTE_FUSED_ATTN"),
    "fused": _TE.format("NVTE_FLASH_ATTN"),
    "unfused": f"{NAME.model.attention_backend}=native (unfused attention has no context parallelism)",
    "local": f"{NAME.model.attention_backend}=native {NAME.model.transformer_impl}=local (nothing of Transformer "
    "Engine)",
}


@cache
def by_bare_name() -> dict[str, tuple[str, Meaning]]:
    """Return name without section -> dotted name and meaning, first section first."""
    found: dict[str, tuple[str, Meaning]] = {}
    for name, meaning in names().settings.items():
        found.setdefault(name.partition(".")[2], (name, meaning))
    return found


def settle(settings: dict[str, Any]) -> list[Violation]:
    """Remove upstream's names from nested settings in place; return the violations.

    Names that neither upstream nor this project has are kept.
    """
    problems = []
    known, ours = names(), our_settings()
    for section in list(settings):
        whole = known.sections.get(section)
        values = settings[section] if isinstance(settings[section], dict) else {}
        for name in [name for name in values if f"{section}.{name}" not in ours]:
            path = f"{section}.{name}"
            meaning = known.settings.get(path, whole)
            if meaning is None:
                problems += _misplaced(path, name, values)
                continue
            value = values.pop(name)
            if not (meaning.accepts(value) or _has_our_value(meaning, name, value, settings)):
                problems.append(Violation("K1", "error", path, meaning.message, meaning.fix, value))
        if not isinstance(settings[section], dict):
            problems += _misplaced(section, section, settings)
        if whole is not None:
            value = settings.pop(section)
            if not isinstance(value, dict) and not whole.accepts(value):
                problems.append(Violation("K1", "error", section, whole.message, whole.fix, value))
    return problems + _settle_optimizer(settings) + _settle_attention(settings)


def _misplaced(path: str, name: str, values: dict[str, Any]) -> list[Violation]:
    """Remove an upstream name that is in the wrong section; empty for other names."""
    home, meaning = by_bare_name().get(name, (None, None))
    if meaning is None or name in {path.rpartition(".")[2] for path in our_settings()}:
        return []
    message = f"belongs to '{home}' upstream: {meaning.message or 'it has no effect here'}"
    return [Violation("K1", "error", path, message, meaning.fix or _REMOVE, values.pop(name))]


def _has_our_value(meaning: Meaning, name: str, value: Any, settings: dict[str, Any]) -> bool:
    """Return whether our setting has the same value."""
    if meaning.setting is None:
        return False
    section, _, ours = meaning.setting.partition(".")
    if section == "mixed_precision" and not ours:
        chosen = settings["mixed_precision"]
        return bool(value is False or chosen.get(_PRECISION_OF.get(str(value), name if value is True else "")))
    return _same(value, settings[section].get(ours))


def _settle_optimizer(settings: dict[str, Any]) -> list[Violation]:
    """Apply Bridge's second optimizer switch and its default threshold.

    Removes the second setting if both are equal.
    """
    if settings["optimizer"].get("grad_norm_skip_threshold") == math.inf:  # upstream's default
        settings["optimizer"]["grad_norm_skip_threshold"] = None
    name = "use_distributed_optimizer"
    given, decided = settings["ddp"].pop(name, None), settings["optimizer"].get(name)
    if given is None or given == decided:
        return []
    fix = f"optimizer.{name}={str(given).lower()}"
    return [Violation("K1", "error", f"ddp.{name}", f"named 'optimizer.{name}' here, which is {decided}", fix, given)]


def _settle_attention(settings: dict[str, Any]) -> list[Violation]:
    model = settings["model"]
    backend = model.get("attention_backend")
    if backend is None:  # megatron-core's default: Transformer Engine chooses
        model["attention_backend"] = "auto"
    if not isinstance(backend, str) or backend not in _BACKENDS:
        return []
    model["attention_backend"] = "auto"
    message = "single kernels of Transformer Engine cannot be chosen"
    return [Violation("K2", "error", NAME.model.attention_backend, message, _BACKENDS[backend], backend)]
