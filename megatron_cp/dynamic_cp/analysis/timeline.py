"""Draw steps as timelines: ranks down, time across, groups coloured by CP size, idle time grey.

Each group's rectangle is solid for the bare work in it and pale for communication and fixed costs, so that both things
that make static CP slow, waiting and communicating for short samples, can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.dynamic_cp.analysis.report import Report, compared
from megatron_cp.dynamic_cp.cost import CostModel

# From one rank (yellow) by powers of two to 1024 (black): steps that differ in lightness too.
_COLOURS = (
    "#f5c211",
    "#8fce3c",
    "#35b779",
    "#1f9e9a",
    "#2f78b7",
    "#4a55b0",
    "#5b2a86",
    "#8b1e6d",
    "#b5304a",
    "#d1495b",
    "#2b2b2b",
)
_IDLE = "#f0f0f0"
_TIME = "simulated seconds from the start of the optimizer step"
_ROOM_FOR_LABEL = 0.2  # of the time axis; the label takes less


def _colours(reports: Sequence[Report]) -> dict[int, str]:
    """A colour for each CP size in use: always the same for a power of two, a blend of its neighbours for another."""
    return {size: _colour(size) for size in sorted({size for report in reports for size in report.cp_sizes})}


def _colour(size: int) -> str:
    exponent = min(math.log2(size), len(_COLOURS) - 1)
    lower, upper = _COLOURS[math.floor(exponent)], _COLOURS[math.ceil(exponent)]
    share = exponent % 1
    parts = [round((1 - share) * int(lower[i : i + 2], 16) + share * int(upper[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in parts)


@dataclass(frozen=True)
class _Bar:
    """A group's rectangle: first rank, ranks, start, end of the bare work in it, end."""

    first: int
    ranks: int
    start: float
    worked: float
    stop: float


def _bars(report: Report, lengths: np.ndarray, cost: CostModel) -> Iterator[_Bar]:
    for span in report.step.spans:
        group, samples = span.group, lengths[list(span.group.sample_ids)]
        worked = min(span.start + cost.ideal_seconds(samples) / group.cp_size, span.stop)
        yield _Bar(group.ranks[0], group.cp_size, span.start, worked, span.stop)


def _headline(static: Report, dynamic: Report) -> str:
    return f"{dynamic.title} (below): {compared(dynamic, static)} (above)"


def _saving(report: Report, reports: Sequence[Report]) -> str:
    """The label beside the bars of the last report, where they leave room for it."""
    latest = max(each.seconds for each in reports)
    saved = latest - report.seconds
    return f"{saved:.2f} s less (simulated)" if report is reports[-1] and saved > _ROOM_FOR_LABEL * latest else ""


def _caption(report: Report) -> str:
    drawn = max((span.stop for span in report.step.spans), default=0.0)
    waiting = "idle and pipeline bubble, drawn at the end," if report.seconds > 1.001 * drawn else "idle"
    return (
        f"{report.title}: simulated {report.seconds:.2f} s   (useful work {report.useful:.0%}, communication and "
        f"overhead {report.overhead:.0%}, {waiting} {report.idle:.0%})"
    )


def write_png(path: Path, reports: Sequence[Report], lengths: np.ndarray, cost: CostModel, num_ranks: int) -> None:
    """Draw ``reports`` (static first, dynamic last) one above the other on one time axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator

    latest = max(report.seconds for report in reports)
    idle: dict[str, Any] = {"facecolor": _IDLE, "edgecolor": "#999999", "hatch": "///", "linewidth": 0.0}
    figure, axes = plt.subplots(len(reports), 1, figsize=(13, 3.6 * len(reports) + 0.8), sharex=True, squeeze=False)
    colours = _colours(reports)
    for axis, report in zip(axes[:, 0], reports, strict=True):
        end = report.seconds
        axis.add_patch(Rectangle((0, 0), end, num_ranks, **idle))
        pale, solid, pale_colours, solid_colours = [], [], [], []
        for bar in _bars(report, lengths, cost):
            colour = colours[bar.ranks]
            pale.append(Rectangle((bar.start, bar.first), bar.stop - bar.start, bar.ranks))
            solid.append(Rectangle((bar.start, bar.first), bar.worked - bar.start, bar.ranks))
            pale_colours.append(matplotlib.colors.to_rgba(colour, 0.35))
            solid_colours.append(colour)
        line = 0.4 if num_ranks <= 128 else 0.1
        axis.add_collection(PatchCollection(pale, facecolors="white", edgecolors="none"))
        axis.add_collection(PatchCollection(pale, facecolors=pale_colours, edgecolors="white", linewidths=line))
        axis.add_collection(PatchCollection(solid, facecolors=solid_colours, edgecolors="white", linewidths=line))
        axis.axvline(end, color="black", linewidth=1.5)
        if saving := _saving(report, reports):
            axis.annotate(
                "", (latest, num_ranks / 2), (end, num_ranks / 2), arrowprops={"arrowstyle": "<->", "color": "black"}
            )
            axis.text((end + latest) / 2, num_ranks * 0.46, saving, ha="center", va="bottom")
        axis.set_xlim(0, latest * 1.01)
        axis.set_ylim(num_ranks, 0)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel("rank")
        axis.set_title(_caption(report), loc="left", fontsize=11)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel(_TIME)
    legend = [Patch(facecolor=colour, label=f"CP {size}") for size, colour in colours.items()]
    legend += [
        Patch(
            facecolor=matplotlib.colors.to_rgba(list(colours.values())[-1], 0.35), label="pale: communication, overhead"
        ),
        Patch(**idle, label="idle"),
    ]
    figure.suptitle(_headline(reports[0], reports[-1]), x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.legend(handles=legend, loc="lower center", ncols=min(len(legend), 9), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 0.98))
    figure.savefig(path, dpi=120)
    plt.close(figure)
