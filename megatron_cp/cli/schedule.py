"""``megatron-cp schedule``: schedule sequence lengths, without a GPU or torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.common.errors import EXIT_CONFIG, EXIT_OK
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.data.lengths import lengths_from
from megatron_cp.dynamic_cp.analysis.recorded import RecordedStep, read_step
from megatron_cp.dynamic_cp.analysis.report import as_text, report
from megatron_cp.dynamic_cp.distributions import DISTRIBUTIONS, sample_lengths
from megatron_cp.dynamic_cp.scheduler.fixed import schedule_fixed_cp, smallest_cp_size
from megatron_cp.dynamic_cp.scheduler.problem import TooLongError
from megatron_cp.dynamic_cp.scheduler.schedule import schedule
from megatron_cp.estimate.cost_presets import NAMES, cost_preset
from megatron_cp.parallel.layout import MOST_RANKS

# Limits reject a mistyped number at once; these values take seconds to minutes.
_MOST_SAMPLES = 10_000_000
_LONGEST = 131072  # longest length drawn from a distribution
# Options that only some sources use (a run has recorded the rest), with their defaults.
_PLANNED = ("lengths", "distribution")
_GOES_WITH: dict[str, tuple[tuple[str, ...], Any]] = {
    "iteration": (("from_run",), None),
    "seed": (("distribution",), 0),
    "count": (_PLANNED, None),
    "longest": (_PLANNED, None),
    "ranks": (_PLANNED, None),
    "max_seqlen_per_rank": (_PLANNED, 8192),
    "min_cp_size": (_PLANNED, 1),
    "microbatch_multiple": (_PLANNED, 1),
    "sequence_parallel_size": (_PLANNED, 1),
    "cost": (_PLANNED, "h100_8b"),
}


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        "megatron-cp schedule",
        description="Schedule the samples of one global batch with dynamic CP, and compare with static CP.",
        epilog="example: megatron-cp schedule --distribution documents --count 1024 --ranks 64 --plot step.png",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--lengths",
        metavar="FILE",
        help="whole numbers in a text file (.txt, .gz, - for stdin), or a Megatron .idx file with its .bin beside it",
    )
    source.add_argument("--from-run", metavar="RUN", type=Path, help="a run's folder: show one of its recorded steps")
    source.add_argument("--distribution", choices=sorted(DISTRIBUTIONS), help="draw lengths from this distribution")

    def add(option: str, least: int, most: int, text: str) -> None:
        """Add an option that is a whole number from ``least`` to ``most``."""

        def number(given: str) -> int:  # argparse shows the name
            if not least <= int(given) <= most:
                raise argparse.ArgumentTypeError(f"{given}: must be at least {least} and at most {most:,}")
            return int(given)

        parser.add_argument(option, type=number, help=text)

    add("--count", 1, _MOST_SAMPLES, "samples to draw (default: 1024), or to read from the start of the file")
    cut = f"cut longer samples to this length (default: {_LONGEST} for --distribution, no cut for --lengths)"
    add("--longest", 1, 2**63 - 1, cut)
    add("--seed", 0, 2**63 - 1, "seed of --distribution (default: 0)")
    parser.add_argument("--iteration", type=int, help="step of --from-run (default: the last one)")
    add("--ranks", 1, MOST_RANKS, "data parallel size times context parallel size")
    add("--max-seqlen-per-rank", 1, 2**31 - 1, "tokens a rank holds (default: 8192)")
    add("--min-cp-size", 1, MOST_RANKS, "fewest ranks of a group (default: 1)")
    synchronized = "ranks that finish each microbatch together (expert parallel; default: 1, or the run's)"
    add("--sync-ranks", 1, MOST_RANKS, synchronized)
    add("--pipeline-size", 1, 1_000, "pipeline stages (default: 1, or the run's)")
    add("--microbatch-multiple", 1, 1_000, "round the number of microbatches up to this")
    add("--sequence-parallel-size", 1, 10_000, "tensor parallel size under sequence parallelism")
    parser.add_argument(
        "--static-cp-size", type=int, help="CP size to compare with (default: the run's or the smallest that fits)"
    )
    parser.add_argument("--cost", choices=NAMES, help="cost model (default: h100_8b)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the schedule itself as JSON")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the timeline")
    return parser


def _complete(args: argparse.Namespace) -> None:
    """Fill defaults; ValueError for a given option that the source ignores."""
    option = {name: f"--{name.replace('_', '-')}" for name in (*_PLANNED, "from_run", *_GOES_WITH)}
    source = next(name for name in (*_PLANNED, "from_run") if getattr(args, name) is not None)
    for name, (sources, default) in _GOES_WITH.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif source not in sources:
            fitting = " or ".join(option[s] for s in sources)
            raise ValueError(
                f"{option[name]}: {option[source]} ignores it. Fix: use it with {fitting}, or leave it out"
            )


def _check_files(args: argparse.Namespace) -> None:
    """Check output files before any work; ValueError if one is not writable."""
    for name in ("output", "plot"):
        path = getattr(args, name)
        if path is None:
            continue
        folder, option = path.parent, f"--{name} {path}"
        if str(path) == "-":
            raise ValueError(f"{option}: is not a file name. Fix: --{name} FILE")
        if os.path.isdir(path):
            raise ValueError(f"{option}: is a folder. Fix: name a file in it")
        if not os.path.isdir(folder):
            raise ValueError(f"{option}: no folder {folder}. Fix: mkdir -p {folder}")
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise ValueError(f"{option}: no permission to write. Fix: name a file in another folder")


def _lengths(args: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Return the lengths to schedule, and the number cut to ``--longest``."""
    if args.distribution:
        return sample_lengths(args.distribution, args.count or 1024, args.longest or _LONGEST, args.seed), 0
    lengths = lengths_from(args.lengths)[: args.count]
    if args.longest is None:
        return lengths, 0
    return np.minimum(lengths, args.longest), int((lengths > args.longest).sum())


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 with a message on stderr for invalid input.

    Raises:
        SystemExit: argparse rejected an option, with exit code 2.
    """
    args = _parser().parse_args(argv)
    try:
        _complete(args)
        _check_files(args)
        return _run(args)
    except BrokenPipeError:
        raise  # the reader (head, less) closed the pipe: not an input error
    except TooLongError as error:
        say(f"megatron-cp schedule: {error} (--max-seqlen-per-rank, --ranks, --longest).", file=sys.stderr)
        return EXIT_CONFIG
    except (ValueError, OSError) as error:
        say(f"megatron-cp schedule: {error}", file=sys.stderr)
        return EXIT_CONFIG


def _run(args: argparse.Namespace) -> int:
    """Schedule lengths and compare with packed static CP on the same samples."""
    if args.from_run:
        return _show_run(args)
    if args.ranks is None:
        raise ValueError("--ranks is missing: data parallel size times context parallel size. Fix: --ranks 64")
    (lengths, cut), cost = _lengths(args), cost_preset(args.cost)
    settings = {"microbatch_multiple": args.microbatch_multiple}
    settings |= {"sync_ranks": args.sync_ranks or 1, "pipeline_size": args.pipeline_size or 1}
    limits = {"min_cp_size": args.min_cp_size, "sequence_parallel_size": args.sequence_parallel_size}
    begin = time.process_time()
    found = schedule(lengths, args.ranks, args.max_seqlen_per_rank, cost=cost, **settings, **limits)
    seconds = time.process_time() - begin
    if cut:
        say(f"{cut} of {len(lengths)} samples cut to --longest {args.longest}", file=sys.stderr)
    last = f"scheduled in {1e3 * seconds:.0f} ms of CPU time; simulated with cost model {args.cost}"
    step = RecordedStep(0, found, (), cost, **settings)
    return _show(args, step, lengths, "dynamic CP", {"schedule_seconds": seconds}, last)


def _show_run(args: argparse.Namespace) -> int:
    """Show a recorded step beside packed static CP on the same samples."""
    step = read_step(args.from_run, args.iteration)
    figures = {"iteration": step.iteration, "measured_seconds": step.measured_seconds}
    measured = "" if step.measured_seconds is None else f"; measured, the whole step: {step.measured_seconds:.3f} s"
    last = f"simulated with the run's own cost model{measured}"
    return _show(args, step, np.array(step.lengths), f"the run, iteration {step.iteration}", figures, last)


def _show(
    args: argparse.Namespace, step: RecordedStep, lengths: np.ndarray, title: str, figures: dict[str, Any], last: str
) -> int:
    """Print a step's figures beside packed static CP's, and write the requested files.

    figures: more figures for ``--json``. last: the last line of the text output.
    """
    found, cost, width = step.schedule, step.cost, step.schedule.sequence_parallel_size
    in_step = {
        "sync_ranks": args.sync_ranks or step.sync_ranks,
        "pipeline_size": args.pipeline_size or step.pipeline_size,
    }
    if found.num_ranks % in_step["sync_ranks"]:
        message = f"must divide the run's number of ranks ({found.num_ranks})"
        raise ValueError(f"--sync-ranks {in_step['sync_ranks']}: {message}")
    static_size = args.static_cp_size
    if static_size is None:
        # Dynamic groups may exceed the configured size, and must for longer samples.
        smallest = smallest_cp_size(int(lengths.max()), found.num_ranks, found.max_seqlen_per_rank, width)
        static_size = max(step.context_parallel_size, smallest)
    common: dict[str, Any] = {"cost": cost, "microbatch_multiple": step.microbatch_multiple}
    common["sequence_parallel_size"] = width
    reports = {"run" if args.from_run else "dynamic": report(title, found, lengths, cost, **in_step)}
    for name, balanced, how in (("static", False, "packed in order"), ("dp_balanced", True, "balanced packing")):
        fixed = schedule_fixed_cp(
            lengths, found.num_ranks, found.max_seqlen_per_rank, cp_size=static_size, balanced=balanced, **common
        )
        size = fixed.microbatches[0][0].cp_size
        reports[name] = report(f"static CP {size}, {how}", fixed, lengths, cost, **in_step)
    shown, *static = reports.values()
    if args.json:
        say(json.dumps(figures | {name: each.as_dict() for name, each in reports.items()}, indent=2))
    else:
        say(as_text(shown, static, lengths, found.num_ranks), last, sep="\n")
    if args.output:
        args.output.write_text(json.dumps([[list(group) for group in groups] for groups in found.microbatches]))
    if args.plot:
        from megatron_cp.dynamic_cp.analysis.timeline import write_png

        write_png(args.plot, [static[1], shown], lengths, cost, found.num_ranks)
        say(f"wrote {args.plot}", file=sys.stderr)
    return EXIT_OK
