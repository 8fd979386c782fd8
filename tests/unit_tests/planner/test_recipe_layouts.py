"""The table of recipes and the planner's best layouts is current.

It is what its script prints, and every recipe fits.
"""

from pathlib import Path

import pytest

from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.memory import NEARLY_FULL, estimated
from megatron_cp.rules.remedies import Case
from scripts.recipe_layouts import HEAD, recipes, row

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "recipe_layouts.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("recipe", ["llama31_8b_pretrain_config", "llama3_70b_16k_pretrain_config"])
def test_rows_are_what_the_script_prints(recipe: str) -> None:
    assert row(recipe) in ROWS


def test_every_recipe_fits_on_its_gpus() -> None:
    assert ROWS[0] == f"| {' | '.join(HEAD)} |"
    listed = [line.split(" | ")[0].removeprefix("| ") for line in ROWS[1:]]
    assert listed == recipes()
    for name in recipes():
        config = load_recipe(name)
        peak = estimated(Case(config, config.recipe_world_size or config.model.fewest_ranks, 8, Environment.of("gpu")))
        assert peak is not None and peak.total < NEARLY_FULL * 80 * 2**30, name
