"""Scores of retrieval as a table and as a heat map of depth against length."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_cp.data.needles.scores import Score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 160


def length_name(length: int) -> str:
    """Return 4096 as ``4K``."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def as_text(scores: Sequence[Score]) -> str:
    """Format a table in percent: a row a task and length, a column a depth."""
    depths = _depths(scores)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="right answers, % of samples, by depth")
    for column in ("task", "length", *(f"{depth}%" for depth in depths), "all"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task, length in dict.fromkeys((score.task, score.length) for score in scores):
        row = {score.depth: score for score in scores if (score.task, score.length) == (task, length)}
        total = sum(score.exact for score in row.values()) / sum(score.samples for score in row.values())
        cells = [f"{100 * row[depth].share:.0f}" if depth in row else "" for depth in depths]
        table.add_row(task, length_name(length), *cells, f"{100 * total:.0f}")
    console = Console(file=io.StringIO(), width=_WIDTH)
    console.print(table)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def draw(scores: Sequence[Score], title: str = "") -> Figure:
    """Draw a heat map of each task: lengths to the right, depths downward."""
    import numpy as np
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(score.task for score in scores))
    grids = {task: [score for score in scores if score.task == task] for task in tasks}
    rows = [max(1, len(_depths(grid))) for grid in grids.values()]
    widest = max(len({score.length for score in grid}) for grid in grids.values())
    figure = Figure(figsize=(3.2 + 0.9 * widest, 1.0 + sum(0.8 + 0.36 * count for count in rows)), layout="constrained")
    panels = figure.subplots(len(tasks), 1, squeeze=False, height_ratios=[1 + count for count in rows])
    image: Any = None
    for axes, (task, grid) in zip(panels[:, 0], grids.items(), strict=True):
        lengths = list(dict.fromkeys(score.length for score in grid))
        depths: list[int | None] = list(dict.fromkeys(score.depth for score in grid))
        values = np.array([[_share(grid, length, depth) for length in lengths] for depth in depths])
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
        axes.set_yticks(range(len(depths)), ["spread" if depth is None else f"{depth}%" for depth in depths])
        for (y, x), value in np.ndenumerate(values):
            colour = "black" if value > 0.6 else "white"
            axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=colour)
        axes.set_title(task, loc="left", fontsize=10)
        axes.set_ylabel("depth")
    panels[-1, 0].set_xlabel("length, tokens")
    figure.colorbar(image, ax=panels, label="right answers", format="{x:.0%}", shrink=0.6)
    figure.suptitle(title, fontsize=11)
    return figure


def _share(grid: Sequence[Score], length: int, depth: int | None) -> float:
    return next(score.share for score in grid if (score.length, score.depth) == (length, depth))


def _depths(scores: Sequence[Score]) -> list[int]:
    return sorted({score.depth for score in scores if score.depth is not None})
