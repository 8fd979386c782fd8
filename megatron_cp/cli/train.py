"""``megatron-cp train``: train a recipe, or show what would run."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence

from megatron_cp.api import prepared
from megatron_cp.cli import recipes
from megatron_cp.cli.validate import explain, recipe_parser, report
from megatron_cp.common.errors import EXIT_OK
from megatron_cp.common.terminal import quiet, say
from megatron_cp.config.flags import compose, parse
from megatron_cp.config.recipes import to_yaml
from megatron_cp.launch import launcher
from megatron_cp.launch.process import end_when_interrupted
from megatron_cp.rules import checked


def main(argv: Sequence[str]) -> int:
    parser = recipe_parser("train", "Train a recipe, on one process or with -n N on N processes of this machine.")
    add_ranks(parser)
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="compose the recipe, check it and print it; start nothing"
    )
    parser.add_argument("--list-recipes", "--list_recipes", action="store_true", help="list the recipes")
    parser.add_argument("--print-config", "--print_config", action="store_true", help="print the composed YAML")
    parser.add_argument(
        "--verify", action="store_true", help="before training, compare a reduced layout with a single rank, once"
    )
    args = parse(parser, argv)
    if args.list_recipes:
        return recipes.main(())
    if args.explain:
        return explain(args.explain)
    if args.print_config:
        say(to_yaml(compose(parser, args)), end="")
        return EXIT_OK
    if args.dry_run:
        if args.world_size is None:
            args.world_size = args.ranks
        return report(parser, args, with_settings=True)
    if args.environment or args.world_size is not None:
        parser.error("--environment and --world-size need --dry-run. Fix: add --dry-run")
    return run_or_start("train", parser, args, argv)


def run_or_start(
    command: str, parser: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str], *further: str
) -> int:
    """Check the rules, then train here or start ranks; return the exit code.

    Args:
        command: command that each rank runs, with ``argv``.
        further: overrides that the command adds.
    """
    launcher.rank()  # rejects an invalid RANK before torch is imported
    number = ranks_to_start(parser, args)
    if number is not None:
        with quiet():  # the first rank checks and logs the same again
            checked(compose(parser, args, *further), number, args.gpus_per_node)
        return start_ranks(command, argv, number)
    config = prepared(compose(parser, args, *further), args.gpus_per_node)
    from megatron_cp.training.train import run  # importing torch and megatron-core takes seconds

    gc.freeze()  # the libraries stay: collections during the run, and the one at exit, leave them out
    if not vars(args).get("verify"):
        return run(config)
    from megatron_cp.verify.run import verify_once

    return run(config, verify_once)


def add_ranks(parser: argparse.ArgumentParser) -> None:
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


def ranks_to_start(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int | None:
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


def start_ranks(command: str, argv: Sequence[str], ranks: int) -> int:
    """Run a command on new ranks of this machine; return its exit code.

    The launcher is ``megatron_cp.torchrun``, in this process. Each rank runs the same command and ignores ``-n``.

    Args:
        argv: the command's arguments.
    """
    end_when_interrupted()  # importing torch takes seconds
    # torch's launcher sets this too, and logs four lines about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_cp.torchrun import main

    return main(["--standalone", f"--nproc_per_node={ranks}", "-m", "megatron_cp", command, *argv])
