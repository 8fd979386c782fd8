"""Settings that have no effect because another setting is off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_cp.config.run_config import RunConfig, default_at, settings
from megatron_cp.rules.base import Finding
from megatron_cp.rules.proposals import default_of, either


def unused_settings(config: RunConfig) -> Iterator[Finding]:
    """Yield a warning for each setting with a value that nothing reads."""
    for field, facts in settings().items():
        off = next((when for when in facts.when if not when.holds(config)), None)
        if off is None:
            continue
        value = config.value_at(field)
        if value != default_at(field) and value != _unset(config, field):
            fix = either(default_of(field), off.turn_on)
            yield Finding(field, f"has no effect without {off.switch}", fix, severity="warning")


def _unset(config: RunConfig, field: str) -> Any:
    """Return the value of a setting that is not given; other settings may decide it."""
    section, _, name = field.partition(".")
    without = replace(getattr(config, section), **{name: default_at(field)})
    return replace(config, **{section: without}).finalize().value_at(field)
