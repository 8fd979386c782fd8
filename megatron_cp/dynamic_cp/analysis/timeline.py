"""Draw steps as timelines: ranks by time, coloured by CP size.

The solid part of a group is bare work, the pale part communication and fixed costs. So both costs of static CP, waiting
and communication for short samples, are visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.dynamic_cp.analysis.report import ScheduleReport, compared
from megatron_cp.dynamic_cp.cost import CostModel

# From one rank (yellow) in powers of two to 1024 (dark blue); lightness differs too.
_COLOURS, _LARGEST = "viridis_r", 1024
_IDLE = "#f0f0f0"
_TIME = "simulated seconds from the start of the optimizer step"
_ROOM_FOR_LABEL = 0.2  # share of the time axis


def _saving(report: ScheduleReport, reports: Sequence[ScheduleReport]) -> str:
    """Return the label beside the last report's bars, if there is room."""
    latest = max(each.seconds for each in reports)
    saved = latest - report.seconds
    return f"{saved:.2f} s less (simulated)" if report is reports[-1] and saved > _ROOM_FOR_LABEL * latest else ""


def _caption(report: ScheduleReport) -> str:
    drawn = max((span.stop for span in report.step.spans), default=0.0)
    waiting = "idle and pipeline bubble, drawn at the end," if report.seconds > 1.001 * drawn else "idle"
    return (
        f"{report.title}: simulated {report.seconds:.2f} s   (useful work {report.useful:.0%}, communication and "
        f"overhead {report.overhead:.0%}, {waiting} {report.idle:.0%})"
    )


def write_png(
    path: Path, reports: Sequence[ScheduleReport], lengths: np.ndarray, cost: CostModel, num_ranks: int
) -> None:
    """Draw ``reports`` (static first, dynamic last) above each other on one time axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator

    latest = max(report.seconds for report in reports)
    idle: dict[str, Any] = {"facecolor": _IDLE, "edgecolor": "#999999", "hatch": "///", "linewidth": 0.0}
    figure, axes = plt.subplots(len(reports), 1, figsize=(13, 3.6 * len(reports) + 0.8), sharex=True, squeeze=False)
    sizes = sorted({size for report in reports for size in report.cp_sizes})
    solid = {size: matplotlib.colormaps[_COLOURS](math.log(size, _LARGEST)) for size in sizes}
    pale = {size: matplotlib.colors.to_rgba(colour, 0.35) for size, colour in solid.items()}
    line: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.4 if num_ranks <= 128 else 0.1}
    for axis, report in zip(axes[:, 0], reports, strict=True):
        end = report.seconds
        axis.add_patch(Rectangle((0, 0), end, num_ranks, **idle))
        whole, bare_work, of_size = [], [], [span.group.cp_size for span in report.step.spans]
        for span, size in zip(report.step.spans, of_size, strict=True):
            corner, seconds = (span.start, span.group.ranks[0]), span.stop - span.start
            work = cost.ideal_seconds(lengths[list(span.group.sample_ids)]) / size
            whole.append(Rectangle(corner, seconds, size))
            bare_work.append(Rectangle(corner, min(work, seconds), size))
        axis.add_collection(PatchCollection(whole, facecolors="white", edgecolors="none"))
        axis.add_collection(PatchCollection(whole, facecolors=[pale[size] for size in of_size], **line))
        axis.add_collection(PatchCollection(bare_work, facecolors=[solid[size] for size in of_size], **line))
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
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(_TIME)
    legend = [Patch(facecolor=colour, label=f"CP {size}") for size, colour in solid.items()]
    legend.append(Patch(facecolor=pale[sizes[-1]], label="pale: communication, overhead"))
    legend.append(Patch(**idle, label="idle"))
    headline = f"{reports[-1].title} (below): {compared(reports[-1], reports[0])} (above)"
    figure.suptitle(headline, x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.legend(handles=legend, loc="lower center", ncols=min(len(legend), 9), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 0.98))
    figure.savefig(path, dpi=120)
    plt.close(figure)
