"""The arguments of every command that takes a recipe; flags for frequent settings are called as Megatron-Bridge's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_cp.common.terminal import UsageError
from megatron_cp.config.foreign_flags import answer
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig, settings
from megatron_cp.config.schema import alternatives, kind_of


def add_recipe(parser: argparse.ArgumentParser, what: str) -> None:
    """Let a command take a recipe, by ``--recipe`` or as the first word, and what is laid over it.

    Args:
        what: is done with the recipe; for ``--help``.
    """
    parser.add_argument("--recipe", metavar="NAME|FILE.yaml", help=f"{what}; 'megatron-cp recipes' lists the names")
    parser.add_argument("--config", metavar="FILE.yaml", action="append", default=[], help="merged over the recipe")
    group = parser.add_argument_group("flags for frequent settings")
    for setting, flags in _flags().items():
        if kind_of(RunConfig, setting) is bool:
            group.add_argument(*flags, dest=setting, action="store_false", default=None, help=f"-> {setting}=false")
            continue
        kind = next(kind for kind in alternatives(kind_of(RunConfig, setting)) if kind in (int, float, str))
        names = dict.fromkeys(name for flag in flags for name in (flag, f"{flag[:2]}{flag[2:].replace('_', '-')}"))
        group.add_argument(*names, dest=setting, type=kind, metavar=kind.__name__, help=f"-> {setting}")
    known = "the recipe where --recipe is not given, and any setting, in Hydra's grammar; wins over all of the above"
    add_overrides(parser, known, metavar="[RECIPE] key=value")


def add_overrides(parser: argparse.ArgumentParser, what: str, metavar: str = "key=value") -> None:
    """Let a command take settings as ``args.overrides``; ``what`` is for ``--help``."""
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=what)


def add_world_size(parser: argparse.ArgumentParser, what: str) -> None:
    """Let a command that starts no rank take the number of ranks."""
    parser.add_argument("--world-size", "--world_size", type=int, help=what)


def add_gpus_per_node(parser: argparse.ArgumentParser) -> None:
    """Let a command take the number of ranks that share a node."""
    parser.add_argument("--gpus-per-node", "--gpus_per_node", type=int, help="ranks that share a node")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command that takes a recipe.

    Raises:
        UsageError: wrong arguments; for flags of Megatron-LM and Megatron-Bridge it holds the settings to write.
    """
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise UsageError(parser.prog, answer(parser.prog, argv, unknown))
    if not args.recipe:
        args.recipe = next((word for word in args.overrides if "=" not in word and not word.startswith("~")), None)
        args.overrides = [word for word in args.overrides if word is not args.recipe]
    return args


def compose(parser: argparse.ArgumentParser, args: argparse.Namespace, *further: str) -> RunConfig:
    """The configuration that parsed arguments and ``further`` overrides describe.

    Raises:
        ConfigError: with all problems found.
        UsageError: there is no recipe.
    """
    if not args.recipe:
        parser.error("no recipe is given. Fix: --recipe NAME, of those that 'megatron-cp recipes' lists")
    return load_recipe(args.recipe, [*args.overrides, *further], files=args.config, flags=given(args))


def _flags() -> dict[str, tuple[str, ...]]:
    """The settings that have flags, short and long ones, which are Bridge's."""
    return {setting: facts.flags for setting, facts in settings().items() if facts.flags}


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given by flags, by their dotted names: ``flags`` of ``load_recipe``."""
    values = {setting: getattr(args, setting) for setting in _flags()}
    return {setting: value for setting, value in values.items() if value is not None}
