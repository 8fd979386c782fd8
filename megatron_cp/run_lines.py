"""The lines of a run folder's ``.jsonl`` files, of runs that still write or were killed while they did. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
SCHEDULES = "schedules.jsonl"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file, each with its ``iteration``; what is damaged or half written is left out.

    Raises:
        OSError: the file cannot be read.
    """
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and isinstance(values.get("iteration"), int):
            lines.append(values)
    return lines
