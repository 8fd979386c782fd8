"""``megatron-cp recipes``: list the recipes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cp.common.errors import EXIT_OK
from megatron_cp.common.terminal import ArgumentParser, say
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import list_recipes

_DESCRIPTION = f"List the recipes. [mock data]: random tokens unless {NAME.dataset.data_path}=PREFIX names real data."


def main(argv: Sequence[str]) -> int:
    ArgumentParser("megatron-cp recipes", description=_DESCRIPTION).parse_args(argv)
    recipes = list_recipes()
    width = max(map(len, recipes))
    for name, description in recipes.items():
        say(f"{name:{width}}  {description}")
    return EXIT_OK
