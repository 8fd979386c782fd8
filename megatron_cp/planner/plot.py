"""Plot of a plan: peak memory on the x axis, step time on the y axis.

Shows layouts that fit, the Pareto frontier, the fastest layout, and layouts that do not fit.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_cp.planner.figures import Figures, Setup
from megatron_cp.planner.found import Found
from megatron_cp.rules.memory import gib

# Okabe-Ito palette: safe for colour-blind readers.
_BEST, _FITS, _GREY, _LIMIT = "#d55e00", "#0072b2", "#9a9a9a", "#333333"
_NAMED = 6  # labelled points of each kind


def draw(setup: Setup, found: Found, usable: float, title: str) -> Figure:
    """Draw the layouts on the left and the key of labelled points on the right."""
    ranked = [Figures(setup, each) for each in found.fitting]
    frontier = sorted((Figures(setup, each) for each in found.frontier), key=_x)
    too_large = [Figures(setup, each.layout) for each in found.too_large]
    figure = Figure(figsize=(13.5, 7), layout="constrained")
    axes, key = figure.subplots(1, 2, width_ratios=(1.9, 1))
    limit, widest = usable / 2**30, max(_x(each) for each in (*ranked, *too_large))
    axes.axvspan(limit, 2 * max(widest, limit), color="#f1f1f1", zorder=0)
    axes.axvline(limit, color=_LIMIT, linewidth=1.2, linestyle="--")
    axes.scatter(*_points(too_large), color=_GREY, marker="x", s=60, label="does not fit")
    axes.step(*_points(frontier), where="post", color=_FITS, linewidth=1.4, alpha=0.5)
    hollow = {"color": "white", "edgecolor": _FITS, "zorder": 2.5}
    axes.scatter(*_points(frontier), s=45, label="frontier: faster layouts need more memory", **hollow)
    axes.scatter(*_points(ranked), color=_FITS, s=55, zorder=3, label="fits: fastest of each division of the GPUs")
    axes.scatter(*_points(ranked[:1]), color=_BEST, marker="*", s=480, zorder=4, label="fastest that fits")
    lines = [(str(number), each, "") for number, each in enumerate(ranked[:_NAMED], start=1)]
    others = [each for each in frontier if each.words not in {each.words for each in ranked}]
    chosen = others[:: -max(1, -(-len(others) // _NAMED))]
    lines += [("abcdef"[number], each, "") for number, each in enumerate(chosen)]
    for number, each in enumerate(too_large[:_NAMED]):
        missing = gib(each.layout.memory.total - usable)
        lines.append(("ABCDEF"[number], each, f", {missing} GiB over the limit"))
    for mark, each, _ in lines:
        colour = _BEST if mark == "1" else _GREY if mark.isupper() else _FITS
        axes.annotate(mark, (_x(each), each.seconds), xytext=(8, 6), textcoords="offset points", color=colour,
                      fontsize=11, fontweight="bold")  # fmt: skip
    _key(key, lines)
    axes.text(limit, axes.get_ylim()[1], f"{gib(usable)} of {gib(setup.memory)} GiB usable ", fontsize=9, va="top",
              ha="right", rotation=90, color=_LIMIT)  # fmt: skip
    axes.set_xlabel("estimated peak memory per GPU, GiB (less is better)")
    axes.set_ylabel("estimated step time, seconds (less is better)")
    axes.set_title(f"{setup.gpus} {setup.gpu}, {setup.tokens:,} tokens per step", loc="left", fontsize=11)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, 1.08 * max(widest, limit))
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    return figure


def _key(axes: Any, lines: Sequence[tuple[str, Figures, str]]) -> None:
    """List the labelled points with layout, step time and memory."""
    axes.axis("off")
    texts = [
        (mark, textwrap.wrap(f"{each.words}: {each.seconds:.3g} s, {gib(each.layout.memory.total)} GiB{more}", 52))
        for mark, each, more in lines
    ]
    height = 1 / max(1, sum(len(text) + 0.5 for _, text in texts))
    top = 1.0
    for mark, text in texts:
        colour = _BEST if mark == "1" else "#6f6f6f" if mark.isupper() else _FITS
        style = {"transform": axes.transAxes, "va": "top", "color": colour, "fontsize": 9}
        axes.text(0.0, top, mark, fontweight="bold", **style)
        axes.text(0.06, top, "\n".join(text), linespacing=1.15, **style)
        top -= min(height, 0.036) * (len(text) + 0.5)


def _x(figures: Figures) -> float:
    return figures.layout.memory.total / 2**30


def _points(figures: Sequence[Figures]) -> tuple[list[float], list[float]]:
    return [_x(each) for each in figures], [each.seconds for each in figures]


def write_png(path: Path, setup: Setup, found: Found, usable: float, title: str) -> None:
    """Write the figure as a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs missing from the font
        draw(setup, found, usable, title).savefig(path, format="png", dpi=110)
