"""Arguments of every command with a recipe; frequent settings have Bridge's flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from megatron_cp.common.terminal import UsageError
from megatron_cp.config.foreign_flags import answer
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig, settings
from megatron_cp.config.schema import alternatives, kind_of


def add_recipe(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the arguments for a recipe and for values merged over it.

    Args:
        what: the command's use of the recipe, for ``--help``.
    """
    parser.add_argument("--recipe", metavar="NAME|FILE.yaml", help=f"{what}; 'megatron-cp recipes' lists the names")
    parser.add_argument("--config", metavar="FILE.yaml", action="append", default=[], help="merge over the recipe")
    group = parser.add_argument_group("flags for frequent settings")
    for setting, flags in _flags().items():
        if kind_of(RunConfig, setting) is bool:
            group.add_argument(*flags, dest=setting, action="store_false", default=None, help=f"-> {setting}=false")
            continue
        kind = next(kind for kind in alternatives(kind_of(RunConfig, setting)) if kind in (int, float, str))
        names = dict.fromkeys(name for flag in flags for name in (flag, f"{flag[:2]}{flag[2:].replace('_', '-')}"))
        group.add_argument(*names, dest=setting, type=kind, metavar=kind.__name__, help=f"-> {setting}")
    known = "the recipe without --recipe, and any setting in Hydra's grammar; overrides all of the above"
    add_overrides(parser, known, metavar="[RECIPE] key=value")


def add_overrides(parser: argparse.ArgumentParser, what: str, metavar: str = "key=value") -> None:
    """Add ``args.overrides`` for settings; ``what`` is the help text."""
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=what)


def add_world_size(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--world-size`` to a command that starts no ranks."""
    parser.add_argument("--world-size", "--world_size", type=int, help=what)


def add_gpus_per_node(parser: argparse.ArgumentParser) -> None:
    """Add ``--gpus-per-node``."""
    parser.add_argument("--gpus-per-node", "--gpus_per_node", type=int, help="ranks per node")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command with a recipe.

    Raises:
        UsageError: wrong arguments. For flags of Megatron-LM and Bridge it names the settings to write.
    """
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise UsageError(parser.prog, answer(parser.prog, argv, unknown))
    if not args.recipe:
        args.recipe = next((word for word in args.overrides if not _is_override(word)), None)
        args.overrides = [word for word in args.overrides if word is not args.recipe]
    return args


def overrides_before(option: str, argv: Sequence[str]) -> list[str]:
    """Move overrides that follow an option's values before the option.

    argparse takes all words up to the next flag for values of an option with several.
    """
    words = list(argv)
    if option in words:
        begin = words.index(option) + 1
        end = next((at for at in range(begin, len(words)) if words[at].startswith("-")), len(words))
        values = words[begin:end]
        moved = [word for word in values if _is_override(word) and not os.path.isdir(word)]
        words[begin - 1 : end] = [*moved, option, *(word for word in values if word not in moved)]
    return words


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith("~")


def accept_run_folder(args: argparse.Namespace) -> None:
    """Replace the folder of a run as ``args.recipe`` by the configuration in it."""
    if args.recipe and os.path.isfile(config := os.path.join(args.recipe, "config.yaml")):
        args.recipe = config


def compose(parser: argparse.ArgumentParser, args: argparse.Namespace, *further: str) -> RunConfig:
    """Return the configuration of parsed arguments and ``further`` overrides.

    Raises:
        ConfigError: all problems found.
        UsageError: no recipe.
    """
    if not args.recipe:
        parser.error("no recipe is given. Fix: --recipe NAME ('megatron-cp recipes' lists the names)")
    return load_recipe(args.recipe, [*args.overrides, *further], files=args.config, flags=given(args))


def _flags() -> dict[str, tuple[str, ...]]:
    """Return setting -> flags, short and long, as in Bridge."""
    return {setting: facts.flags for setting, facts in settings().items() if facts.flags}


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings set by flags: dotted name -> value."""
    values = {setting: getattr(args, setting) for setting in _flags()}
    return {setting: value for setting, value in values.items() if value is not None}
