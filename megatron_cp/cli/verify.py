"""``megatron-cp verify``: does this layout train the same model as one rank?"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from megatron_cp.cli import ranks
from megatron_cp.common.errors import EXIT_FAILED, EXIT_OK, failed_alone
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.flags import add_recipe, compose, parse
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.single_rank import on_one_rank
from megatron_cp.launch import launcher
from megatron_cp.verify.reduce import checked, comparable


def main(argv: Sequence[str]) -> int:
    """Compare, print a table on rank 0, and say so in the exit code: 0 equal, 1 different.

    Raises:
        ConfigError: a configuration cannot run.
        RuntimeFault: the comparison could not be made.
    """
    parser = ArgumentParser(
        "megatron-cp verify",
        description="Run a layout and one rank on the same weights and tokens, and compare losses and gradients. "
        "Start it as a training run: megatron-cp verify -n 4 --recipe NAME [key=value ...]",
        allow_abbrev=False,
    )
    add_recipe(parser, "what to verify")
    ranks.add(parser)
    parser.add_argument("--full", action="store_true", help="keep the model's size instead of reducing it")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to compare (default 3)")
    parser.add_argument(
        "--against",
        metavar='"key=value ..."',
        help="compare with the same ranks under these further overrides, instead of with one rank",
    )
    args = parse(parser, argv)
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    launcher.rank()  # refuses a wrong RANK before torch is imported
    number = ranks.to_start(parser, args)
    if number is None:
        return _compare(*_layouts(parser, args, launcher.world_size() or 1))
    with ranks.no_warnings():
        _layouts(parser, args, number)
    return ranks.start("verify", argv, number)


def _layouts(
    parser: argparse.ArgumentParser, args: argparse.Namespace, world_size: int
) -> tuple[list[RunConfig], tuple[str, str]]:
    """The checked configurations to compare, and what they are called."""
    layouts = [compose(parser, args)]
    names = ["one rank", f"{world_size} ranks"]
    if args.against is not None:
        try:
            further = shlex.split(args.against)
        except ValueError as error:  # a quotation mark without its pair
            parser.error(f"--against {args.against!r}: {error}")
        layouts.insert(0, compose(parser, args, *further))
        names = ["against", "layout"]
    layouts = [checked(config, world_size) for config in layouts]
    configs = [checked(config, world_size) for config in comparable(layouts, world_size, args.steps, full=args.full)]
    if launcher.rank() == 0 and layouts[-1].model.moe_aux_loss_coeff and not configs[-1].model.moe_aux_loss_coeff:
        say(
            "note: compared without the router's auxiliary loss (model.moe_aux_loss_coeff=0): a pack's depends on the "
            "samples that share it, and the two layouts pack differently",
            file=sys.stderr,
        )
    return configs, (names[0], names[1])


def _compare(configs: list[RunConfig], names: tuple[str, str]) -> int:
    layout = configs[-1]
    launcher.add_variables(layout.env_vars)
    # torch and megatron-core take ten seconds: only once everything is checked
    from rich.console import Console

    from megatron_cp.mcore.packages import check_mamba_ssm
    from megatron_cp.parallel.collectives import run_on_first_rank
    from megatron_cp.parallel.device import start_distributed, stop_distributed
    from megatron_cp.training.consistency import check_all_ranks_agree
    from megatron_cp.training.monitor.metrics import start_logging
    from megatron_cp.verify.compare import compare_layouts, compare_with_one_rank
    from megatron_cp.verify.report import show

    rank = launcher.rank()
    start_logging(rank, live=False)
    if "M" in layout.model.parts:
        check_mamba_ssm()
    start_distributed(layout)
    try:
        check_all_ranks_agree(layout)
        if len(configs) == 2:
            result = compare_layouts(*configs)
        else:
            result = compare_with_one_rank(layout, on_one_rank(layout))
        console = Console(width=None if sys.stdout.isatty() else 120)
        # The other ranks wait: a launcher stops all ranks as soon as one has ended with a failure.
        run_on_first_rank(lambda: show(result, names, console), "the comparison could not be shown")
        return EXIT_OK if result.equal else EXIT_FAILED
    finally:
        stop_distributed(alone=failed_alone(sys.exception()))
