"""The report as one self-contained HTML file: a table and an SVG figure."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.report.figures import draw
from megatron_cp.report.runs import LoggedRun
from megatron_cp.report.summary import table

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 1320px; margin: 2em auto;
  padding: 0 1.5em; }
h1 { font-size: 1.4em; font-weight: 600; margin-bottom: .8em; }
table { border-collapse: collapse; font-size: .93em; margin-bottom: 1.8em; }
th, td { text-align: left; vertical-align: top; padding: .28em 1.6em .28em 0; border-bottom: 1px solid #e6e6e6; }
th { font-weight: 600; } tbody th { font-weight: 400; color: #666; white-space: nowrap; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
"""


def write_html(path: str, runs: Sequence[LoggedRun]) -> None:
    """Write the page; raises OSError."""
    Path(path).write_text(render(runs), encoding="utf-8")


def render(runs: Sequence[LoggedRun]) -> str:
    """Return the page's HTML."""
    drawn = io.StringIO()
    draw(runs).savefig(drawn, format="svg", metadata={"Date": None})
    picture = drawn.getvalue()
    title = ", ".join(run.name for run in runs)
    heads = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    rows = "\n".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in table(runs)
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<table><thead><tr><th></th>{heads}</tr></thead><tbody>
{rows}
</tbody></table>
{picture[picture.index("<svg") :]}
</body></html>
"""
