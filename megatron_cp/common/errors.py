"""Errors that a run reports to a person, their format, and exit codes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_cp.common.interpolation import as_written
from megatron_cp.common.terminal import in_a_line

# EXIT_FAILED is also verify's code for different results, and doctor's for missing parts.
EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 129, 130, 143
EXIT_OF_SIGNAL = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED, signal.SIGHUP: EXIT_HUNG_UP}


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    ``rule``: the rule's id (``megatron-cp train --explain ID`` prints it). ``severity``: "error" or "warning".
    ``field``: the dotted name of the setting. ``value``: its value. ``fix``: what satisfies the rule.
    """

    rule: str
    severity: str
    field: str
    message: str
    fix: str = ""
    value: Any = None

    def __str__(self) -> str:
        where = self.field if self.value is None else f"{self.field}={as_written(self.value)}"
        head = f"{self.severity} {self.rule}".rstrip()
        text = in_a_line(": ".join(part for part in (head, where, self.message) if part))
        return f"{text}\n    fix: {in_a_line(self.fix)}" if self.fix else text


def format_violations(violations: Sequence[Violation]) -> str:
    """Join violations into one text, errors before warnings."""
    return "\n".join(str(v) for v in sorted(violations, key=lambda v: v.severity != "error"))


def join_limited(texts: Sequence[str], between: str, most: int = 8) -> str:
    """Join the first ``most`` texts, and state how many more there are."""
    left = len(texts) - most
    return between.join(texts[:most]) + (f"{between if between.isspace() else ' '}and {left} more" if left > 0 else "")


def ranks_by_value(values: Sequence[str]) -> dict[str, list[int]]:
    """Group ranks by value, given one value a rank; in the order of first ranks."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 0-2, 5``."""
    # rank - index is constant within a run of consecutive ranks.
    rows = [[rank for _, rank in row] for _, row in groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    text = join_limited([str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows], ", ", most=16)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class ConfigError(ValueError, AssertionError):
    """Configuration that cannot run; ``violations`` lists what is wrong."""

    def __init__(self, problems: str | Sequence[Violation]) -> None:
        if isinstance(problems, str):
            problems = [Violation("", "error", "", problems)]
        self.violations: list[Violation] = list(problems)
        super().__init__(format_violations(self.violations))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Violation]]]:
        return type(self), (self.violations,)  # for another process; the text would get a second prefix


class RuntimeFault(RuntimeError):
    """Run that cannot continue; the message names the rank, the step and the fix.

    ``on_all_ranks``: every rank raises the same fault, so one of them prints it. ``of_data``: caused by files or
    settings, so a restart would fail in the same way.
    """

    def __init__(self, message: str, *, on_all_ranks: bool = False, of_data: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks
        self.of_data = of_data


class DataError(ValueError):
    """Corpus, tokenizer or indexed file that cannot be used."""


@contextmanager
def readable(path: object) -> Iterator[None]:
    """Raise DataError for an OSError of the body: file ``path`` cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error


class UnusableCheckpoint(ValueError):
    """Checkpoint file that is damaged or has foreign content; the message names it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or ["no details"])[0]


def is_local_failure(error: BaseException | None) -> bool:
    """Return whether only this rank has the error, so that others may wait for it."""
    if isinstance(error, RuntimeFault):
        return not error.on_all_ranks
    return error is not None and not isinstance(error, ConfigError | DataError)
