"""``megatron-cp report``: compare runs by their folders, without a GPU or torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_cp.common.errors import DataError
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.names import NAME
from megatron_cp.report.runs import read_runs
from megatron_cp.report.summary import as_text


def main(argv: Sequence[str]) -> int:
    """Print the table, write the requested files and return 0.

    Raises:
        DataError: a folder is not a run's, or a file cannot be written.
    """
    parser = ArgumentParser(
        "megatron-cp report",
        description="Show runs side by side: loss, throughput, phases, memory and layout. Works while they run.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"a run folder ({NAME.checkpoint.save})")
    parser.add_argument("--html", metavar="FILE.html", help="write a self-contained page")
    parser.add_argument("--png", metavar="FILE.png", help="write a picture")
    args = parser.parse_args(argv)
    runs = read_runs(list(dict.fromkeys(args.runs)))
    say(as_text(runs))
    try:
        if args.html:
            from megatron_cp.report.page import write_html  # importing matplotlib takes a second

            write_html(args.html, runs)
            say(f"wrote {args.html}")
        if args.png:
            from megatron_cp.report.figures import write_png

            write_png(args.png, runs)
            say(f"wrote {args.png}")
    except OSError as error:
        raise DataError(f"cannot write the report: {error}") from error
    return 0
