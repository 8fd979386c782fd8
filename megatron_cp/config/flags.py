"""The arguments of every command that takes a recipe; flags for frequent settings are called as Megatron-Bridge's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_cp.common.terminal import UsageError
from megatron_cp.config.foreign_flags import answer
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig

# Short and long flag (Bridge's), type, the setting it stands for.
_FLAGS: tuple[tuple[str | None, str, type, str], ...] = (
    ("-ms", "--max_steps", int, "train.train_iters"),
    ("-gb", "--global_batch_size", int, "train.global_batch_size"),
    ("-mb", "--micro_batch_size", int, "train.micro_batch_size"),
    ("-sl", "--seq_length", int, "dataset.seq_length"),
    ("-tp", "--tensor_model_parallel_size", int, "model.tensor_model_parallel_size"),
    ("-pp", "--pipeline_model_parallel_size", int, "model.pipeline_model_parallel_size"),
    ("-cp", "--context_parallel_size", int, "model.context_parallel_size"),
    ("-vp", "--virtual_pipeline_model_parallel_size", int, "model.virtual_pipeline_model_parallel_size"),
    ("-ep", "--expert_model_parallel_size", int, "model.expert_model_parallel_size"),
    ("-etp", "--expert_tensor_parallel_size", int, "model.expert_tensor_parallel_size"),
    (None, "--lr", float, "optimizer.lr"),
    (None, "--min_lr", float, "optimizer.min_lr"),
    (None, "--warmup_iters", int, "scheduler.lr_warmup_iters"),
    (None, "--pretrained_checkpoint", str, "checkpoint.pretrained_checkpoint"),
    (None, "--save_dir", str, "checkpoint.save"),
    (None, "--load_dir", str, "checkpoint.load"),
    (None, "--save_interval", int, "checkpoint.save_interval"),
)


def add_recipe(parser: argparse.ArgumentParser, what: str) -> None:
    """Let a command take a recipe, by ``--recipe`` or as the first word, and what is laid over it.

    Args:
        what: is done with the recipe; for ``--help``.
    """
    parser.add_argument("--recipe", metavar="NAME|FILE.yaml", help=f"{what}; 'megatron-cp recipes' lists the names")
    parser.add_argument("--config", metavar="FILE.yaml", action="append", default=[], help="merged over the recipe")
    group = parser.add_argument_group("flags for frequent settings")
    for short, long, kind, setting in _FLAGS:
        names = dict.fromkeys(name for name in (short, long, long.replace("_", "-")) if name)
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


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given by flags, by their dotted names: ``flags`` of ``load_recipe``."""
    values = {setting: getattr(args, setting) for *_, setting in _FLAGS}
    return {setting: value for setting, value in values.items() if value is not None}
