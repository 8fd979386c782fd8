"""Lines of a run folder's ``.jsonl`` files, also of running or killed runs. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_cp.common.atomic_files import atomic_write
from megatron_cp.common.input_files import file_or_pipe, parse_json, read_bytes

METRICS = "metrics.jsonl"
SCHEDULES = "schedules.jsonl"
_BEGINS = re.compile(rb'\{"iteration": (\d{1,18})[,}]')
_LAST = 10**18 - 1  # larger numbers are damage


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines that have an ``iteration``; skip damaged lines.

    Raises:
        OSError: the file cannot be read.
    """
    lines = []
    for line in read_bytes(path).splitlines():
        try:
            values = parse_json(line)
        except ValueError:
            continue
        if isinstance(values, dict) and type(number := values.get("iteration")) is int and abs(number) <= _LAST:
            lines.append(values)
    return lines


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each complete line and its iteration, without parsing the rest.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", opener=file_or_pipe) as file:
        for line in file:
            iteration = _iteration_of(line)
            if iteration is not None:
                yield iteration, line


def keep_lines_until(path: Path, iteration: int) -> None:
    """Drop lines after ``iteration``, which a resumed run repeats, and partial lines."""
    if not path.exists():
        return
    end, dropped, mixed = 0, False, False
    with open(path, "rb", opener=file_or_pipe) as file:
        for line in file:
            number = _iteration_of(line)
            keep = number is not None and number <= iteration
            dropped |= not keep
            mixed |= keep and dropped
            end += len(line) if not dropped else 0
    if not mixed:
        os.truncate(path, end)
        return
    with atomic_write(path, only_writer=True) as (partial,), partial.open("wb") as file:
        file.writelines(line for number, line in numbered_lines(path) if number <= iteration)


def _iteration_of(line: bytes) -> int | None:
    """Return a line's iteration; None if the line's start or end is damaged."""
    begins = _BEGINS.match(line)
    return int(begins[1]) if begins and line.endswith(b"}\n") else None
