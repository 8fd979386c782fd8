"""Findings of checks, and helpers that write their fixes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import typed
from megatron_cp.config.run_config import default_at
from megatron_cp.rules.remedies import ALTERNATIVES

NATIVE = f"{NAME.model.attention_backend}=native"
EXPERTS_LIKE_THE_REST = f"{NAME.model.expert_model_parallel_size}=1 {NAME.model.expert_tensor_parallel_size}=null"
Severity = Literal["error", "warning"]


class Finding:
    """A finding of a check: the setting, the message and the fix.

    The fix is text in the form of :mod:`megatron_cp.rules.remedies`. It may propose alternatives that do not work: each
    is tried before it is shown.

    Args:
        field: dotted name of the setting.
        message: what is wrong.
        fixes: alternatives, best first. ``=VALUE`` sets ``field``; empty ones are dropped.
        values: valid values of ``field``, proposed before ``fixes``.
        severity: overrides the rule's severity.
    """

    def __init__(
        self, field: str, message: str, *fixes: str, values: Iterable[Any] = (), severity: Severity | None = None
    ) -> None:
        self.field, self.message, self.severity = field, message, severity
        self.fix = either(one_of(field, values), *(f"{field}{fix}" if fix.startswith("=") else fix for fix in fixes))


def default_of(field: str) -> str:
    """Return the override that sets the default: ``model.rotary_percent=1.0``."""
    return typed(field, default_at(field))


def one_of(field: str, values: Iterable[Any]) -> str:
    """Return a fix with one alternative per value of the setting."""
    return either(*(typed(field, value) for value in values))


def either(*alternatives: str) -> str:
    """Return the text of a fix with several alternatives; empty ones are dropped."""
    return ALTERNATIVES.join(filter(None, alternatives))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [d for d in range(1, math.isqrt(max(0, number)) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def closest(values: Iterable[int], to: int) -> list[int]:
    """Sort values by distance to a number; of two equal distances the smaller first."""
    return sorted(values, key=lambda value: (abs(value - to), value))


def nearest_multiples(number: int, of: int) -> list[int]:
    """Return the multiples around a number, such as 8176 and 8192."""
    below = number // of * of
    return [below, below + of] if below > 0 else [of]


def resized(entries: list[Any], length: int) -> list[Any]:
    """Return a list cut to a length, or extended with its last entry."""
    return (entries + entries[-1:] * length)[:length]


def ones(entries: list[int]) -> list[int]:
    """Return 1 for each entry that is not 0."""
    return [int(bool(entry)) for entry in entries]
