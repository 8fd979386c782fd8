"""Plot runs side by side with matplotlib: loss, throughput, phases, memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_cp.report.runs import LoggedRun

# Okabe and Ito's palette, safe for colour blindness.
_RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5d5d5d", "#b8a800")
_PHASES = {
    "forward_backward": "#0072b2",
    "optimizer": "#56b4e9",
    "data": "#e69f00",
    "schedule": "#d55e00",
    "checkpoint": "#009e73",
    "evaluation": "#cc79a7",
    "other": "#bbbbbb",
}
_SMOOTH_FROM = 120  # points, above which a mean line is drawn


def draw(runs: Sequence[LoggedRun], width: float = 13.0) -> Figure:
    """Draw one figure with all panels; ``width`` in inches."""
    bars = 0.55 + 0.42 * len(runs)
    key = 0.3 * len(runs)
    heights = (3.6, 2.6, bars)
    figure = Figure(figsize=(width, key + sum(heights) + 1.2), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=heights)
    loss = figure.add_subplot(grid[0, :])
    _lines(loss, runs, "lm_loss", "lm loss")
    _held_out(loss, runs)
    _limit_to_most(loss, runs)
    _lines(figure.add_subplot(grid[1, 0]), runs, "tokens_per_s", "tokens/s, all devices", from_zero=True)
    _lines(figure.add_subplot(grid[1, 1]), runs, "tflops_per_device", "TFLOP/s a device", from_zero=True)
    _phase_bars(figure.add_subplot(grid[2, 0]), runs)
    _memory_bars(figure.add_subplot(grid[2, 1]), runs)
    handles = [
        Line2D([], [], color=_colour(k), linewidth=3, label=f"{run.name}   {run.layout}") for k, run in enumerate(runs)
    ]
    figure.legend(handles=handles, loc="outside upper left", frameon=False, fontsize=10)
    return figure


def _colour(k: int) -> str:
    return _RUNS[k % len(_RUNS)]


def _lines(axes: Any, runs: Sequence[LoggedRun], field: str, title: str, from_zero: bool = False) -> None:
    for k, run in enumerate(runs):
        iterations, values = run.points(field)
        if not values:
            continue
        # Dashes keep overlapping lines visible.
        dashes = "-" if k % 2 == 0 else (0, (5, 1.5))
        if len(values) > _SMOOTH_FROM:
            axes.plot(iterations, values, color=_colour(k), alpha=0.25, linewidth=0.7)
            values = _smooth(values)
        marker = "o" if len(values) == 1 else None
        axes.plot(iterations, values, color=_colour(k), linestyle=dashes, linewidth=1.6, marker=marker)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("iteration", loc="right", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if from_zero:
        largest = max((value for run in runs for value in run.points(field)[1]), default=1.0)
        axes.set_ylim(0, 1.08 * largest or 1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    _plain(axes)


def _held_out(axes: Any, runs: Sequence[LoggedRun]) -> None:
    for k, run in enumerate(runs):
        iterations, values = run.points("validation_loss")
        if values:
            axes.plot(iterations, values, color=_colour(k), linestyle="none", marker="D", markersize=5)
            axes.set_title("lm loss (lines) and validation loss (diamonds)", loc="left", fontsize=11)


def _limit_to_most(axes: Any, runs: Sequence[LoggedRun]) -> None:
    """End the loss axis above nearly all values, ignoring spikes and divergence."""
    values = sorted(value for run in runs for value in run.points("lm_loss")[1])
    if len(values) >= 50 and values[-1] > 2 * values[int(0.995 * len(values))]:
        axes.set_ylim(top=1.1 * values[int(0.995 * len(values))])


def _phase_bars(axes: Any, runs: Sequence[LoggedRun]) -> None:
    seen = {}
    for row, run in enumerate(runs):
        seconds, left = run.phase_seconds, 0.0
        total = sum(seconds.values())
        for name, colour in _PHASES.items():
            if seconds.get(name):
                seen[name] = axes.barh(row, 1e3 * seconds[name], left=left, color=colour, height=0.62)
                if seconds[name] > 0.07 * total:
                    middle, share = left + 500 * seconds[name], f"{seconds[name] / total:.0%}"
                    axes.text(middle, row, share, va="center", ha="center", fontsize=8.5, color="white")
                left += 1e3 * seconds[name]
        if total:
            axes.text(left, row, f" {left:.1f}", va="center", fontsize=8.5)
    _name_bars(axes, runs, "iteration with evaluations and checkpoints, ms (mean)")
    if seen:
        labels = [name.replace("_", "-") for name in seen]
        axes.legend(
            [bar[0] for bar in seen.values()],
            labels,
            ncols=len(seen),
            fontsize=8,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(0, -0.16),
            columnspacing=1.0,
            handlelength=1.0,
        )
    else:
        axes.text(0.5, 0.5, "these runs recorded no phases", transform=axes.transAxes, ha="center")


def _memory_bars(axes: Any, runs: Sequence[LoggedRun]) -> None:
    for row, run in enumerate(runs):
        values = run.points("peak_memory_bytes")[1]
        if values:
            axes.barh(row, max(values) / 1e9, color=_colour(row), height=0.62)
            axes.text(max(values) / 1e9, row, f" {max(values) / 1e9:.2f}", va="center", fontsize=8.5)
    _name_bars(axes, runs, "peak memory a rank, GB")


def _name_bars(axes: Any, runs: Sequence[LoggedRun], title: str) -> None:
    """Label a panel and its bars, one per run."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_yticks(range(len(runs)), [_short(run.name) for run in runs], fontsize=9)
    axes.set_ylim(len(runs) - 0.45, -0.55)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    _plain(axes, "x")


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def _plain(axes: Any, grid: str = "y") -> None:
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return a centred moving mean over a fortieth of the run."""
    half, last = max(1, len(values) // 80), len(values) - 1
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    reach = [min(half, k, last - k) for k in range(len(values))]
    return [(sums[k + r + 1] - sums[k - r]) / (2 * r + 1) for k, r in enumerate(reach)]


def write_png(path: str, runs: Sequence[LoggedRun]) -> None:
    """Write the figure as a PNG; raises OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing glyphs
        draw(runs).savefig(path, format="png", dpi=110)
