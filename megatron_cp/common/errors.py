"""The errors that a run reports to a person, how they are worded, and what a command ends with."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_cp.common.interpolation import as_written
from megatron_cp.common.terminal import in_a_line

# EXIT_FAILED is also for a layout that verify finds different, and for what doctor finds missing.
EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 129, 130, 143
EXIT_OF_SIGNAL = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED, signal.SIGHUP: EXIT_HUNG_UP}


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    ``rule`` is the rule's id (``megatron-cp train --explain ID`` tells more), ``severity`` is "error" or "warning",
    ``field`` the dotted name of the setting, ``value`` what it was set to, and ``fix`` what would satisfy the rule.
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
    """All violations in one text, errors before warnings."""
    return "\n".join(str(v) for v in sorted(violations, key=lambda v: v.severity != "error"))


def shown(texts: Sequence[str], between: str, most: int = 8) -> str:
    """The first ``most`` texts in one, and how many more there are: on a line of its own where each text has one."""
    left = len(texts) - most
    return between.join(texts[:most]) + (f"{between if between.isspace() else ' '}and {left} more" if left > 0 else "")


def ranks_by_value(values: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that have each value, where ``values[rank]`` is a rank's; in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def shown_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    # In a row of ranks, a rank is as far from its place as the one before.
    rows = [[rank for _, rank in row] for _, row in groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    text = shown([str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows], ", ", most=16)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class ConfigError(ValueError, AssertionError):
    """The configuration cannot run; raised before any process group exists. Carries every violation found."""

    def __init__(self, problems: str | Sequence[Violation]) -> None:
        if isinstance(problems, str):
            problems = [Violation("", "error", "", problems)]
        self.violations: list[Violation] = list(problems)
        super().__init__(format_violations(self.violations))


class RuntimeFault(RuntimeError):
    """A running job cannot go on; the message names the rank, the step and what to do.

    ``on_all_ranks``: every rank raises the same one, so that one of them is enough to say it. ``of_data``: files or
    settings are at fault, so that starting again would only meet it again.
    """

    def __init__(self, message: str, *, on_all_ranks: bool = False, of_data: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks
        self.of_data = of_data


class DataError(ValueError):
    """A corpus, tokenizer or indexed file cannot be used; the message names it and says what is wrong with it."""


@contextmanager
def readable(path: object) -> Iterator[None]:
    """Raise DataError where the body finds that the file ``path`` cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error


class UnusableCheckpoint(ValueError):
    """A checkpoint's file is damaged, or holds what no checkpoint of ours does; the message names it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, which may have none."""
    return (str(error).strip().splitlines() or ["no details"])[0]


def failed_alone(error: BaseException | None) -> bool:
    """Whether an error is this rank's only, so that others may wait for it; ``None`` is no error."""
    if isinstance(error, RuntimeFault):
        return not error.on_all_ranks
    return error is not None and not isinstance(error, ConfigError | DataError)
