"""``-n N``: start a command's ranks on this machine.

The launcher is ``megatron_cp.torchrun``, in this process. Each rank runs the same command and ignores ``-n``. Use
``python -m megatron_cp.torchrun`` for several machines.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron_cp.launch import launcher
from megatron_cp.launch.process import end_when_interrupted


def add(parser: argparse.ArgumentParser) -> None:
    """Add ``-n`` to a parser."""
    parser.add_argument(
        "-n",
        "--nproc-per-node",
        "--nproc_per_node",
        dest="ranks",
        type=int,
        metavar="N",
        help="ranks to start on this machine, one per device (default: 1). For several machines: python -m "
        "megatron_cp.torchrun ... -m megatron_cp COMMAND",
    )


def to_start(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int | None:
    """Return the number of ranks to start; None if this process does the work.

    Raises:
        UsageError: the number is below 1, or differs from the number of ranks of the current launcher.
    """
    if args.ranks is None:
        return None
    if args.ranks < 1:
        parser.error(f"-n={args.ranks}: must be at least 1. Fix: -n 1")
    world_size = launcher.world_size()
    if world_size not in (None, args.ranks):
        parser.error(f"-n={args.ranks}: a launcher has started {world_size} ranks already. Fix: leave out -n")
    return args.ranks if world_size is None and args.ranks > 1 else None


def start(command: str, argv: Sequence[str], ranks: int) -> int:
    """Run a command on new ranks; return its exit code.

    Args:
        argv: the command's arguments.
    """
    end_when_interrupted()  # importing torch takes seconds
    # torch's launcher sets this too, and logs four lines about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_cp.torchrun import main

    return main(["--standalone", f"--nproc_per_node={ranks}", "-m", "megatron_cp", command, *argv])
