"""``megatron-cp preview``: show what a training step reads."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence

from megatron_cp.common.errors import EXIT_OK
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.flags import accept_run_folder, add_gpus_per_node, add_recipe, add_world_size, compose, parse
from megatron_cp.launch import launcher
from megatron_cp.rules import Environment, check_or_raise, resolve_auto
from megatron_cp.rules.remedies import Case
from megatron_cp.rules.resolve import ranks_to_check

_MOST = 10_000_000  # steps, samples, tokens: rejects a mistyped number at once


def main(argv: Sequence[str]) -> int:
    """Print the step and return 0.

    Raises:
        ConfigError: a rule is broken.
        DataError: a file or a sample cannot be read.
    """
    parser = ArgumentParser(
        "megatron-cp preview",
        description="Show what a training step reads: decoded samples, the tokens in the loss, documents, packs, "
        "lengths, and which ranks read them. Runs in one process, without a model or a GPU.",
        epilog="example: megatron-cp preview llama_tiny_pretrain_config --step 3 --samples 2",
        allow_abbrev=False,
    )
    add_recipe(parser, "a run's folder, or a recipe")
    add_world_size(parser, "ranks to divide the step over (default: the recipe's recipe_world_size)")
    add_gpus_per_node(parser)
    parser.add_argument(
        "--environment",
        metavar="gpu|cpu|FILE.yaml",
        help="machine of the run, for the time model of packs: as in validate (default: this machine)",
    )
    parser.add_argument("--step", type=_from(1), default=1, help="iteration to show, from 1 on (default: 1)")
    parser.add_argument("--samples", type=_from(0), default=4, help="samples to decode (default: 4)")
    parser.add_argument(
        "--width",
        type=_from(2),
        default=200,
        help="tokens to show of a sample; the middle of longer ones is left out (default: 200)",
    )
    parser.add_argument("--full", action="store_true", help="show whole samples, and all groups of ranks")
    parser.add_argument("--json", action="store_true", help="print the step as JSON, with whole texts")
    args = parse(parser, argv)
    accept_run_folder(args)
    config = compose(parser, args)
    world_size, environment = ranks_to_check(config, args.world_size), Environment.of(args.environment)
    config, _ = resolve_auto(config, world_size, args.gpus_per_node, environment)
    check_or_raise(config, world_size, args.gpus_per_node, environment)
    launcher.add_variables(config.env_vars)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron_cp.preview.run import preview  # importing torch and megatron-core takes ten seconds

    case = Case(config, world_size, args.gpus_per_node, environment)
    shown = preview(case, args.step, args.samples, None if args.full else args.width, as_data=args.json)
    if shown is not None:
        say(json.dumps(shown, indent=2))
    return EXIT_OK


def _from(least: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number of at least ``least``."""

    def number(given: str) -> int:  # argparse shows the name
        if not least <= int(given) <= _MOST:
            raise argparse.ArgumentTypeError(f"{given}: must be at least {least} and at most {_MOST:,}")
        return int(given)

    return number
