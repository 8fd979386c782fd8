"""``megatron-cp verify``: compare a layout's results with a single rank's."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import nullcontext

from megatron_cp.cli.train import add_ranks, ranks_to_start, start_ranks
from megatron_cp.common.errors import EXIT_FAILED, EXIT_OK
from megatron_cp.common.terminal import ArgumentParser, quiet
from megatron_cp.config.flags import add_recipe, compose, parse
from megatron_cp.launch import launcher
from megatron_cp.verify.reduce import checked_and_comparable


def main(argv: Sequence[str]) -> int:
    """Compare, print a table on rank 0 and return 0 (equal) or 1 (different).

    Raises:
        ConfigError: a configuration cannot run.
        RuntimeFault: the comparison could not be made.
    """
    parser = ArgumentParser(
        "megatron-cp verify",
        description="Run a layout and a single rank on the same weights and tokens; compare losses and gradients. "
        "Start it like a training run: megatron-cp verify -n 4 --recipe NAME [key=value ...]",
        allow_abbrev=False,
    )
    add_recipe(parser, "what to verify")
    add_ranks(parser)
    parser.add_argument("--full", action="store_true", help="use the full model instead of a reduced one")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to compare (default 3)")
    parser.add_argument(
        "--against",
        metavar='"key=value ..."',
        help="compare with the same ranks under these overrides, instead of with a single rank",
    )
    args = parse(parser, argv)
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    launcher.rank()  # rejects an invalid RANK before torch is imported
    number = ranks_to_start(parser, args)
    world_size = number or launcher.world_size() or 1
    with nullcontext() if number is None else quiet():
        layouts = [compose(parser, args, *further) for further in _overrides(parser, args.against)]
        configs = checked_and_comparable(layouts, world_size, args.steps, full=args.full)
    if number is not None:
        return start_ranks("verify", argv, number)
    names = ("one rank", f"{world_size} ranks") if args.against is None else ("against", "layout")
    launcher.add_variables(configs[-1].env_vars)
    from megatron_cp.verify.run import verify  # importing torch takes ten seconds: after all checks

    return EXIT_OK if verify(configs, names) else EXIT_FAILED


def _overrides(parser: argparse.ArgumentParser, against: str | None) -> list[list[str]]:
    """Return each layout's extra overrides: ``--against``'s, if given, and none."""
    try:
        return [[]] if against is None else [shlex.split(against), []]
    except ValueError as error:  # an unclosed quotation mark
        parser.error(f"--against {against!r}: {error}")
