"""``megatron-cp train``: train a recipe, or show what would run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_cp.api import prepared
from megatron_cp.cli import ranks, recipes
from megatron_cp.cli.validate import explain, recipe_parser, report
from megatron_cp.common.errors import EXIT_OK
from megatron_cp.common.terminal import quiet, say
from megatron_cp.config.flags import compose, parse
from megatron_cp.config.recipes import to_yaml
from megatron_cp.launch import launcher
from megatron_cp.rules import checked


def main(argv: Sequence[str]) -> int:
    parser = recipe_parser("train", "Train a recipe, on one process or with -n N on N processes of this machine.")
    ranks.add(parser)
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
    number = ranks.to_start(parser, args)
    if number is not None:
        with quiet():  # the first rank checks and logs the same again
            checked(compose(parser, args, *further), number, args.gpus_per_node)
        return ranks.start(command, argv, number)
    config = prepared(compose(parser, args, *further), args.gpus_per_node)
    from megatron_cp.training.train import run  # importing torch and megatron-core takes ten seconds

    if not vars(args).get("verify"):
        return run(config)
    from megatron_cp.verify.run import verify_once

    return run(config, verify_once)
