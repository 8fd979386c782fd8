"""Draw steps as timelines: ranks down, time across, groups coloured by CP size, idle time grey; as PNG or HTML.

Each group's rectangle is solid for the bare work in it and pale for communication and fixed costs, so that both things
that make static CP slow, waiting and communicating for short samples, can be seen.
"""

from __future__ import annotations

import html
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


def _ticks(end: float) -> list[float]:
    """Round numbers from 0 to ``end``, five to ten of them."""
    step = 10.0 ** math.floor(math.log10(end))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if end / (step * part) <= 10)
    return [k * step for k in range(int(end / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Bar:
    """A group's rectangle: first rank, ranks, start, seconds of bare work, end, and a description."""

    first: int
    ranks: int
    start: float
    worked: float
    stop: float
    text: str


def _bars(report: Report, lengths: np.ndarray, cost: CostModel) -> Iterator[_Bar]:
    for span in report.step.spans:
        group, samples = span.group, lengths[list(span.group.sample_ids)]
        worked = min(span.start + cost.ideal_seconds(samples) / group.cp_size, span.stop)
        text = (
            f"microbatch {span.microbatch}, CP {group.cp_size} (ranks {group.ranks[0]}-{group.ranks[-1]}): "
            f"{len(samples)} samples, {int(samples.sum())} tokens, longest {int(samples.max())}; "
            f"{span.start:.3f} s to {span.stop:.3f} s, {(worked - span.start) / (span.stop - span.start):.0%} bare work"
        )
        yield _Bar(group.ranks[0], group.cp_size, span.start, worked, span.stop, text)


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


def write_html(path: Path, reports: Sequence[Report], lengths: np.ndarray, cost: CostModel, num_ranks: int) -> None:
    """The same picture as one page without dependencies; pointing at a group tells what it runs."""
    latest = max(report.seconds for report in reports) or 1.0
    width, height, left = 1200, max(180, min(420, 4 * num_ranks)), 50
    colours = _colours(reports)
    legend = [f"<i style='background:{colour}'></i>CP {size}" for size, colour in colours.items()]
    pale = list(colours.values())[-1]
    legend.append(f"<i style='background:{pale}'></i><i style='background:{pale};opacity:.35;margin-left:0'></i>")
    legend.append("solid: bare work, pale: communication and overhead")
    legend.append("<i class='idle'></i>idle")
    parts = [
        "<!doctype html><meta charset='utf-8'><title>Dynamic CP timeline</title>",
        "<style>body{font:14px system-ui,sans-serif;margin:24px;color:#222}svg{display:block;margin:4px 0 20px}"
        "svg text{font-size:12px}text.size{text-anchor:middle;fill:#fff;pointer-events:none}"
        "rect.g:hover{stroke:#000;stroke-width:2}h2{margin-bottom:8px}p{margin:0 0 18px}"
        "i{display:inline-block;width:12px;height:12px;margin:0 4px 0 14px;vertical-align:-1px}"
        "i.idle{background:repeating-linear-gradient(135deg,#f0f0f0 0 4px,#999 4px 5px)}</style>",
        f"<h2>{html.escape(_headline(reports[0], reports[-1]))}</h2><p>{''.join(legend)}</p>",
    ]
    x, y = width / latest, height / num_ranks
    for number, report in enumerate(reports):
        end = report.seconds
        parts.append(f"<b>{html.escape(_caption(report))}</b>")
        parts.append(f"<svg width='{left + width + 60}' height='{height + 44}'><g transform='translate({left} 6)'>")
        parts.append(
            f"<defs><pattern id='idle{number}' width='6' height='6' patternUnits='userSpaceOnUse' "
            f"patternTransform='rotate(45)'><rect width='6' height='6' fill='{_IDLE}'/>"
            "<line y2='6' stroke='#999' stroke-width='1.5'/></pattern></defs>"
        )
        parts.append(f"<rect width='{end * x:.1f}' height='{height}' fill='url(#idle{number})'/>")
        for bar in _bars(report, lengths, cost):
            colour, text = colours[bar.ranks], html.escape(bar.text)
            box = f"x='{bar.start * x:.2f}' y='{bar.first * y:.2f}' height='{bar.ranks * y:.2f}'"
            worked, whole = (bar.worked - bar.start) * x, (bar.stop - bar.start) * x
            parts.append(f"<rect {box} width='{whole:.2f}' fill='#fff'/>")
            parts.append(f"<rect {box} width='{whole:.2f}' fill='{colour}' fill-opacity='.35'/>")
            parts.append(f"<rect {box} width='{worked:.2f}' fill='{colour}'/>")
            parts.append(
                f"<rect class='g' {box} width='{whole:.2f}' fill='transparent' stroke='#fff' "
                f"stroke-width='{0.8 if num_ranks <= 128 else 0.2}'><title>{text}</title></rect>"
            )
            if bar.ranks * y >= 15 and worked >= 50:
                place = f"x='{(bar.start + bar.worked) * x / 2:.1f}' y='{(bar.first + bar.ranks / 2) * y + 4:.1f}'"
                parts.append(f"<text class='size' {place}>CP {bar.ranks}</text>")
        parts += _axes(num_ranks, latest, x, height)
        parts.append(f"<line x1='{end * x:.1f}' x2='{end * x:.1f}' y2='{height}' stroke='#000' stroke-width='2'/>")
        if saving := _saving(report, reports):
            middle = f"x='{(end + latest) * x / 2:.1f}' text-anchor='middle'"
            line = f"x1='{end * x + 3:.1f}' x2='{latest * x:.1f}' y1='{height / 2}' y2='{height / 2}'"
            parts.append(f"<line {line} stroke='#000' stroke-dasharray='4 3'/>")
            parts.append(f"<text {middle} y='{height / 2 - 8}'>{saving}</text>")
        parts.append("</g></svg>")
    path.write_text("\n".join(parts), encoding="utf-8")


def _axes(num_ranks: int, latest: float, x: float, height: int) -> Iterator[str]:
    """SVG: rank numbers at the left, seconds below. ``x``: pixels a second."""
    yield f"<line y2='{height}' stroke='#222'/><line x2='{latest * x:.1f}' y1='{height}' y2='{height}' stroke='#222'/>"
    step = max(1, num_ranks // 8)
    for rank in range(0, num_ranks, step):
        middle = (rank + 0.5) * height / num_ranks
        yield f"<text x='-6' y='{middle + 4:.1f}' text-anchor='end'>{rank}</text>"
    yield f"<text x='-36' y='{height / 2}' text-anchor='middle' transform='rotate(-90 -36 {height / 2})'>rank</text>"
    for second in _ticks(latest):
        yield f"<line x1='{second * x:.1f}' x2='{second * x:.1f}' y1='{height}' y2='{height + 5}' stroke='#222'/>"
        yield f"<text x='{second * x:.1f}' y='{height + 18}' text-anchor='middle'>{second:g}</text>"
    yield f"<text x='{latest * x / 2:.1f}' y='{height + 36}' text-anchor='middle'>{_TIME}</text>"
