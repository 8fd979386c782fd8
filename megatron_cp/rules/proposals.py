"""What a check found, and what its fix proposes to type: overrides as text, and values around one that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import typed
from megatron_cp.config.run_config import default_at
from megatron_cp.rules.remedies import BETWEEN

NATIVE = f"{NAME.model.attention_backend}=native"
EXPERTS_LIKE_THE_REST = f"{NAME.model.expert_model_parallel_size}=1 {NAME.model.expert_tensor_parallel_size}=null"
Severity = Literal["error", "warning"]


class Finding:
    """What a check found: the setting, what is wrong, and what would be right.

    The fix is text in the form of :mod:`megatron_cp.rules.remedies`. It may propose more than works: every alternative
    is tried before it is shown.

    Args:
        field: the dotted name of the setting.
        message: what is wrong with it.
        fixes: alternatives, the best first; ``=VALUE`` gives ``field`` this value. Empty ones are left out.
        values: of ``field``, that would be right: alternatives before ``fixes``.
        severity: where it differs from the rule's.
    """

    def __init__(
        self, field: str, message: str, *fixes: str, values: Iterable[Any] = (), severity: Severity | None = None
    ) -> None:
        self.field, self.message, self.severity = field, message, severity
        self.fix = either(one_of(field, values), *(f"{field}{fix}" if fix.startswith("=") else fix for fix in fixes))


def default_of(field: str) -> str:
    """The override that gives a setting its default: ``model.rotary_percent=1.0``."""
    return typed(field, default_at(field))


def one_of(field: str, values: Iterable[Any]) -> str:
    """A setting with each of the values, as alternatives."""
    return either(*(typed(field, value) for value in values))


def either(*alternatives: str) -> str:
    """The text of a fix with several alternatives, the best first; empty ones are left out."""
    return BETWEEN.join(filter(None, alternatives))


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(max(0, number)) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def closest(values: Iterable[int], to: int) -> list[int]:
    """Values by their distance from a number, the smaller of two equal distances first."""
    return sorted(values, key=lambda value: (abs(value - to), value))


def nearest_multiples(number: int, of: int) -> list[int]:
    """The multiples around a number: 8176 and 8192."""
    below = number // of * of
    return [below, below + of] if below > 0 else [of]


def resized(entries: list[Any], length: int) -> list[Any]:
    """A list of another length: cut, or with its last entry repeated."""
    return (entries + entries[-1:] * length)[:length]


def ones(entries: list[int]) -> list[int]:
    """The entries with 1 for each that is not 0."""
    return [int(bool(entry)) for entry in entries]
