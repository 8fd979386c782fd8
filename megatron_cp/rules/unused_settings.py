"""Settings that are read only where another one switches them on: they change nothing, silently, where it is off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_cp.config.run_config import RunConfig, default_at, settings
from megatron_cp.rules.base import Finding
from megatron_cp.rules.proposals import default_of, either


def unused_settings(config: RunConfig) -> Iterator[Finding]:
    """A warning for each setting of a finalized configuration that was given a value and is read by nothing."""
    for field, facts in settings().items():
        off = next((when for when in facts.when if not when.holds(config)), None)
        value = config.value_at(field)
        if off and value != default_at(field) and value != _unset(config, field):
            fix = either(default_of(field), off.turn_on)
            yield Finding(field, f"has no effect: it is read with {off.switch} only", fix, severity="warning")


def _unset(config: RunConfig, field: str) -> Any:
    """What the setting is where nobody gives it: its default, which others may decide."""
    section, _, name = field.partition(".")
    without = replace(getattr(config, section), **{name: default_at(field)})
    return replace(config, **{section: without}).finalize().value_at(field)
