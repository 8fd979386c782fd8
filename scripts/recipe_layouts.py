"""Print the table of docs/reference/recipe_layouts.md.

The table has each recipe's layout beside the planner's best. Both are estimated.

    python scripts/recipe_layouts.py              # minutes
    python scripts/recipe_layouts.py RECIPE ...

On H100 of 80 GB, 8 a node. Documents of different lengths are drawn from the distribution ``documents``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_cp.common.terminal import say
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import list_recipes, load_recipe
from megatron_cp.dynamic_cp.distributions import sample_lengths
from megatron_cp.estimate.device import load_device
from megatron_cp.planner.figures import words
from megatron_cp.planner.found import Estimated, Models
from megatron_cp.planner.packed import packed_time
from megatron_cp.planner.search import Search
from megatron_cp.planner.space import Space, with_settings
from megatron_cp.rules.environment import Environment
from megatron_cp.rules.job import job_of
from megatron_cp.rules.memory import NEARLY_FULL, gib
from megatron_cp.rules.remedies import Case

GPU, PER_NODE = "h100", 8
HEAD = ["recipe", "GPUs", "step s", "GiB", "the planner's best", "step s", "GiB", "recipe / best"]


def recipes() -> list[str]:
    """Return the recipes for GPUs: all with a published model."""
    return [name for name in list_recipes() if "_tiny_" not in name]


def row(name: str) -> str:
    """Return a recipe's line of the table."""
    config = load_recipe(name)
    gpus = config.recipe_world_size or config.model.fewest_ranks
    device, node = load_device(GPU), min(gpus, PER_NODE)
    case = Case(config, gpus, node, Environment.of("gpu"))
    case = with_settings(case, {NAME.train.check_memory: False})  # the search compares memory itself
    models = Models.on(device, node)
    packed, batch = config.model.sequence_packing_scheduler is not None, config.train.global_batch_size
    lengths = tuple(sample_lengths("documents", batch, config.dataset.seq_length).tolist()) if packed else None
    job = job_of(case)
    assert job is not None, f"{name}: unknown vocabulary"
    own = Estimated({}, models.memory(job), packed_time(case, lengths, models) if lengths else models.time(job))
    best = Search(Space(case, (), node, lengths), NEARLY_FULL * device.memory, models).run(1).fitting[0]
    figures = [f"{_seconds_text(each.time.seconds)} | {gib(each.memory.total)}" for each in (own, best)]
    ratio = f"{own.time.seconds / best.time.seconds:.2f}"
    return f"| {name} | {gpus} | {figures[0]} | {words(best.settings, gpus)} | {figures[1]} | {ratio} |"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def main(names: list[str]) -> None:
    say(f"| {' | '.join(HEAD)} |\n|---|{'---|' * (len(HEAD) - 1)}")
    for name in names or recipes():
        say(row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
