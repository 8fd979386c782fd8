"""What stands in the way of a conversion, told at once."""

from __future__ import annotations

import math
from typing import Any

from megatron_cp.common.errors import ConfigError, Violation


class Problems:
    """All that stands in the way."""

    def __init__(self, fix: str = "choose another model: this one has no counterpart") -> None:
        self._fix = fix
        self._found: list[Violation] = []

    def unless(self, holds: bool, field: str, value: Any, message: str) -> None:
        if not holds:
            self._found.append(Violation("", "error", field, message, self._fix, value))

    def tell(self) -> None:
        """Raises ConfigError where there is anything."""
        if self._found:
            raise ConfigError(self._found)


def is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
