"""A plan as tables for a terminal, and as plain data."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from megatron_cp.config.overrides import quoted
from megatron_cp.planner.figures import Figures, Setup
from megatron_cp.rules.memory import gib

_WIDTH = 120  # if stdout is not a terminal
_LEAST_SHARE = 0.01


def as_dict(
    setup: Setup,
    layouts: Sequence[Figures],
    frontier: Sequence[Figures],
    too_large: Sequence[tuple[Figures, Sequence[str]]],
    usable: float,
) -> dict[str, Any]:
    """Return the layouts as plain data, for ``--json``."""
    return {
        "gpu": setup.gpu,
        "gpus": setup.gpus,
        "gpus_per_node": setup.gpus_per_node,
        "memory_bytes": setup.memory,
        "usable_bytes": usable,
        "tokens_per_step": setup.tokens,
        "layouts": [each.as_dict() for each in layouts],
        "frontier": [each.as_dict() for each in frontier],
        "too_large": [each.as_dict() | {"fits_with": fix} for each, fix in too_large],
    }


def ranking(layouts: Sequence[Figures]) -> str:
    """Format the ranked layouts, one row each."""
    table = _table("", "layout", "step s", "tokens/s/GPU", "MFU", "peak GiB", "free", "limited by")
    for number, each in enumerate(layouts, start=1):
        table.add_row(
            str(number),
            each.words,
            f"{each.seconds:.4g}",
            f"{each.tokens_per_gpu:,.0f}",
            f"{each.mfu:.0%}",
            gib(each.layout.memory.total),
            gib(each.free),
            each.limit,
        )
    return _render(table)


def not_fitting(layouts: Sequence[tuple[Figures, Sequence[str]]], usable: float) -> str:
    """Format layouts that do not fit, with the excess and settings that fit."""
    table = _table("", "does not fit", "step s if it fit", "GiB over limit", "fits with")
    for each, overrides in layouts:
        missing = gib(each.layout.memory.total - usable)
        fix = " ".join(map(quoted, overrides)) or "more GPUs"
        table.add_row("", each.words, f"{each.seconds:.4g}", missing, fix)
    return _render(table)


def details(figures: Figures) -> str:
    """Format time and memory of a layout by kind, in two lines."""
    seconds, total = figures.seconds, figures.layout.memory.total
    time = {kind: f"{seconds * share:.3g} s ({share:.0%})" for kind, share in figures.time_shares().items()}
    memory = {kind: gib(total * share) for kind, share in figures.memory_shares().items()}
    return f"time:   {_join(time, figures.time_shares())}\nGiB:    {_join(memory, figures.memory_shares())}"


def _join(shown: Mapping[str, str], shares: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {text}" for kind, text in shown.items() if shares[kind] >= _LEAST_SHARE)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        is_text = "layout" in name or ("fit" in name and "if" not in name) or "limited" in name
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def _render(content: RenderableType) -> str:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    console = Console(file=io.StringIO(), width=max(width, 80), color_system=None, markup=False)
    console.print(content)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())
