"""Settings of Megatron-Bridge and megatron-core that are called otherwise here, always so, or not offered. Pure.

A configuration written for Bridge may keep what asks for nothing, or for what is done anyway: it is left out of the
run's own configuration. What asks for anything else is an error that says what to write instead. The names are data,
in ``bridge_names.yaml``.
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

_LEAVE_OUT = "leave it out"
_SWITCHED_OFF: tuple[Any, ...] = (None, False, 0, "", "none", [])
_PRECISION_OF = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


class Meaning(NamedTuple):
    """What a name of Bridge's or megatron-core's means here.

    ``accepted`` are the values that change nothing; None stands for any. ``setting`` is our setting that says the same.
    """

    message: str
    fix: str
    accepted: tuple[Any, ...] | None
    setting: str | None = None

    def accepts(self, value: Any) -> bool:
        """Whether the value may be dropped; a mapping may where all that is in it may."""
        if isinstance(value, dict):
            return all(self.accepts(inner) for inner in value.values())
        return self.accepted is None or any(_same(value, each) for each in self.accepted)


class Names(NamedTuple):
    """All that is in ``bridge_names.yaml``: by dotted names of settings, and by names of sections."""

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
        yield name, Meaning(f"is '{setting}' here", fix, (None, *entry.get("accepted", ())), setting)
    for name, entry in table["always"].items():
        values = entry["values"] if isinstance(entry, dict) else entry
        fix = entry["type"] if isinstance(entry, dict) else _LEAVE_OUT
        shown = str(values[0]).lower() if isinstance(values[0], bool) else values[0]
        yield name, Meaning(f"only {shown} is offered", fix, (None, *values))
    for group in table["not_offered"]:
        yield from _each_of(group, _absent(group))
    fix = "mixed_precision=bf16_mixed, or mixed_precision=fp16_mixed, or mixed_precision=fp32"
    precision = Meaning("follows from mixed_precision", fix, (None,), "mixed_precision")
    yield from _each_of(table["precision"], precision)
    yield from _each_of(table["without_effect"], Meaning("", "", None))


def _absent(group: dict[str, Any]) -> Meaning:
    accepted = (*_SWITCHED_OFF, *group.get("accepted", ()))
    return Meaning(f"not offered: {group['why']}", group.get("type", _LEAVE_OUT), accepted)


def _each_of(group: dict[str, Any], meaning: Meaning) -> Iterator[tuple[str, Meaning]]:
    for section, words in group.items():
        if section not in ("why", "type", "accepted"):
            yield from ((f"{section}.{name}", meaning) for name in words.split())


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)  # True is no 1, as in the schema


_TE = (
    f"{NAME.model.attention_backend}=te: Transformer Engine takes the fastest; env_vars.{{}}=0 takes the other "
    f"away from it"
)
# megatron-core's choices of a kernel of Transformer Engine's.
_BACKENDS = {
    "flash": _TE.format("NVTE_FUSED_ATTN"),
    "fused": _TE.format("NVTE_FLASH_ATTN"),
    "unfused": f"{NAME.model.attention_backend}=native: Transformer Engine's unfused attention has no context "
    "parallelism",
    "local": f"{NAME.model.attention_backend}=native: our own attention; {NAME.model.transformer_impl}=local: none "
    "of its layers",
}


@cache
def by_bare_name() -> dict[str, tuple[str, Meaning]]:
    """Dotted name and meaning of each bare name: of the first section that has it."""
    found: dict[str, tuple[str, Meaning]] = {}
    for name, meaning in names().settings.items():
        found.setdefault(name.partition(".")[2], (name, meaning))
    return found


def settle(settings: dict[str, Any]) -> list[Violation]:
    """Take Bridge's names out of a run's settings, nested by sections, in place; returns those that cannot be obeyed.

    Names that neither Bridge nor this project knows stay where they are.
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
            if not (meaning.accepts(value) or _says_the_same(meaning, name, value, settings)):
                problems.append(Violation("K1", "error", path, meaning.message, meaning.fix, value))
        if not isinstance(settings[section], dict):
            problems += _misplaced(section, section, settings)
        if whole is not None:
            value = settings.pop(section)
            if not isinstance(value, dict) and not whole.accepts(value):
                problems.append(Violation("K1", "error", section, whole.message, whole.fix, value))
    if settings["train"].get("train_iters", 0) is None and settings["train"].get("train_samples") is not None:
        del settings["train"]["train_iters"]  # a length in samples takes the place of a recipe's iterations
    return problems + _settle_optimizer(settings) + _settle_attention(settings)


def _misplaced(path: str, name: str, values: dict[str, Any]) -> list[Violation]:
    """Take out a name that upstream has in another section; none where it is no name of upstream's."""
    home, meaning = by_bare_name().get(name, (None, None))
    if meaning is None or name in {path.rpartition(".")[2] for path in our_settings()}:
        return []
    message = f"is upstream's '{home}': {meaning.message or 'it has no effect here'}"
    return [Violation("K1", "error", path, message, meaning.fix or _LEAVE_OUT, values.pop(name))]


def _says_the_same(meaning: Meaning, name: str, value: Any, settings: dict[str, Any]) -> bool:
    """Whether our setting has this value anyway."""
    if meaning.setting is None:
        return False
    section, _, ours = meaning.setting.partition(".")
    if section == "mixed_precision" and not ours:
        chosen = settings["mixed_precision"]
        return bool(value is False or chosen.get(_PRECISION_OF.get(str(value), name if value is True else "")))
    return _same(value, settings[section].get(ours))


def _settle_optimizer(settings: dict[str, Any]) -> list[Violation]:
    """Bridge says in two places whether the optimizer is distributed; both must agree there, too."""
    if settings["optimizer"].get("grad_norm_skip_threshold") == math.inf:  # upstream's default
        settings["optimizer"]["grad_norm_skip_threshold"] = None
    name = "use_distributed_optimizer"
    said, decided = settings["ddp"].pop(name, None), settings["optimizer"].get(name)
    if said is None or said == decided:
        return []
    fix = f"optimizer.{name}={str(said).lower()}"
    return [Violation("K1", "error", f"ddp.{name}", f"is 'optimizer.{name}' here, which is {decided}", fix, said)]


def _settle_attention(settings: dict[str, Any]) -> list[Violation]:
    model = settings["model"]
    backend = model.get("attention_backend")
    if backend is None:  # of megatron-core: Transformer Engine decides
        model["attention_backend"] = "auto"
    if not isinstance(backend, str) or backend not in _BACKENDS:
        return []
    model["attention_backend"] = "auto"
    message = "kernels of Transformer Engine are not chosen one by one"
    return [Violation("K2", "error", NAME.model.attention_backend, message, _BACKENDS[backend], backend)]
