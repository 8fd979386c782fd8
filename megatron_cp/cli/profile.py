"""``megatron-cp profile``: show where the time of profiled steps went."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.common.errors import DataError
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.names import NAME
from megatron_cp.report.traces import COMMUNICATION, PYTHON, Breakdown, read_trace

_NOTHING = "idle"


def main(argv: Sequence[str]) -> int:
    """Print each trace's tables and return 0.

    Raises:
        DataError: a trace is missing or cannot be read.
    """
    parser = ArgumentParser(
        "megatron-cp profile",
        description="Show where the time of profiled steps went: kernels by kind, exposed communication, "
        "and idle time of the device.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="RUN|TRACE", help="a run folder with profiles, or one trace (.json.gz)"
    )
    parser.add_argument(
        "--kernels", type=int, default=15, metavar="N", help="list the N longest kernels (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    say("\n\n".join(as_text(read_trace(path), args.kernels) for path in _traces(args.paths)))
    return 0


def _traces(paths: Sequence[Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in paths:
        if os.path.isdir(path):  # unlike Path.is_dir, never raises
            inside = sorted((path / "profile").glob("*.json.gz"))
            if not inside:
                raise DataError(f"{path}: no profiles. Fix: run it with {NAME.profiling.use_pytorch_profiler}=true")
            found |= dict.fromkeys(inside)
        else:
            found[path] = None
    return list(found)


def as_text(found: Breakdown, longest: int) -> str:
    """Format the tables of a trace for a terminal."""
    where = f"on {found.device}" if found.device else "on the host, no GPU"
    what = f"{found.iterations} profiled iteration{'s' * (found.iterations > 1)} of {1e3 * found.seconds:.1f} ms"
    lines = [f"{found.name}: {what} {where}"]
    kinds, idle, notes = found.kinds, sum(found.idle.values()), {}
    if found.device:
        kinds[_NOTHING] = idle
        notes = {COMMUNICATION: f"{100 * found.exposed / found.seconds:.1f} % exposed"}
        notes[_NOTHING] = _by_phase(found)
    else:  # Python outside of operators
        kinds[PYTHON] = kinds.pop(PYTHON, 0.0) + idle
    lines += [_line(found, seconds, kind, notes.get(kind, "")) for kind, seconds in kinds.items()]
    if found.device:
        count, waited = found.waits
        lines.append(f"host waits for the device: {count:g} an iteration, {1e3 * waited:.1f} ms in total")
    if longest > 0:
        lines.append("longest:")
        lines += [
            _line(found, kernel.seconds, f"{kernel.calls:g} x {kernel.name}"[:140], "")
            for kernel in found.kernels[:longest]
        ]
    return "\n".join(lines)


def _line(found: Breakdown, seconds: float, name: str, note: str) -> str:
    return f"{100 * seconds / found.seconds:6.1f} % {1e3 * seconds:10.2f} ms  {name}{f': {note}' if note else ''}"


def _by_phase(found: Breakdown) -> str:
    shares = {name: 100 * seconds / found.seconds for name, seconds in found.idle.items()}
    return ", ".join(f"{name.replace('_', '-')} {share:.1f} %" for name, share in shares.items() if share >= 0.05)
