"""Draw a plan: memory across, time up; what fits, the frontier, the best, and why the rest does not fit."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_cp.planner.figures import Figures, Setup
from megatron_cp.planner.search import Found
from megatron_cp.rules.memory import gib

# Okabe and Ito's colours, which colour-blind people can tell apart.
_BEST, _FITS, _GREY, _LIMIT = "#d55e00", "#0072b2", "#9a9a9a", "#333333"
_NAMED = 4  # points of a kind that have a text beside them


def draw(setup: Setup, found: Found, usable: float, title: str) -> Figure:
    """Return the figure."""
    ranked = [Figures(setup, each) for each in found.fitting]
    frontier = [Figures(setup, each) for each in found.frontier]
    too_large = [Figures(setup, each.layout) for each in found.too_large]
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.add_subplot()
    everything = [*ranked, *frontier, *too_large]
    widest = max(_x(each) for each in everything)
    axes.axvspan(usable / 2**30, max(1.08 * widest, 1.2 * usable / 2**30), color="#f3f3f3", zorder=0)
    axes.axvline(usable / 2**30, color=_LIMIT, linewidth=1.2, linestyle="--")
    slowest = max(each.seconds for each in everything)
    axes.scatter(*_points(too_large), color=_GREY, marker="x", s=55, label="does not fit")
    axes.scatter(*_points(ranked), color=_FITS, s=55, label="fits: the fastest of each division of the GPUs")
    steps = sorted(frontier, key=_x)
    axes.step(*_points(steps), where="post", color=_FITS, linewidth=1.4, alpha=0.6)
    axes.scatter(*_points(frontier), color="white", edgecolor=_FITS, s=45, zorder=2.5,
                 label="frontier: nothing is faster with as little memory")  # fmt: skip
    best = ranked[0]
    axes.scatter(*_points([best]), color=_BEST, marker="*", s=420, zorder=4, label="the fastest that fits")
    labels = [(best, f"{best.words}\n{best.seconds:.3g} s, {best.mfu:.0%} MFU, {gib(best.layout.memory.total)} GiB", _BEST)]
    rest = [each for each in (steps[:1] + steps[1:-1][:: max(1, len(steps) // _NAMED)]) if each.words != best.words]
    labels += [(each, each.words, _FITS) for each in rest[:_NAMED]]
    over = [(each, gib(each.layout.memory.total - usable)) for each in too_large[:_NAMED]]
    labels += [(each, f"{each.words}\n{size} GiB too much", _GREY) for each, size in over]
    _annotate(axes, labels)
    axes.text(usable / 2**30, slowest, f" {gib(usable)} GiB of {gib(setup.memory)} are used ", fontsize=9, va="top", ha="right",
              rotation=90, color=_LIMIT)  # fmt: skip
    axes.set_xlabel("estimated peak memory of a GPU, GiB")
    axes.set_ylabel("estimated step, seconds")
    axes.set_title(
        f"{title}: {setup.gpus} {setup.gpu}, {setup.tokens:,} tokens a step", loc="left", fontsize=13, fontweight="bold"
    )
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.08)
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _x(figures: Figures) -> float:
    return figures.layout.memory.total / 2**30


def _points(figures: Sequence[Figures]) -> tuple[list[float], list[float]]:
    return [_x(each) for each in figures], [each.seconds for each in figures]


def _annotate(axes: Any, labels: Sequence[tuple[Figures, str, str]]) -> None:
    """Write beside points, those of one height apart from each other."""
    for number, (each, text, colour) in enumerate(labels):
        text = "\n".join("\n".join(textwrap.wrap(line, 34)) for line in text.splitlines())
        above = number % 2 == 0
        axes.annotate(
            text,
            (_x(each), each.seconds),
            xytext=(8, 10 if above else -10),
            textcoords="offset points",
            va="bottom" if above else "top",
            fontsize=8,
            color=colour,
        )


def write_png(path: Path, setup: Setup, found: Found, usable: float, title: str) -> None:
    """Write the figure as a picture. Raises OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the font lacks
        draw(setup, found, usable, title).savefig(path, format="png", dpi=110)
