"""Find the longest sequence of a model that fits some number of GPUs.

It uses the planner's estimates.

    python benchmarks/longest_sequence.py               # Llama 3.2 1B, 3.1 8B, 3.1 70B on 1, 8, 64 GPUs
    python benchmarks/longest_sequence.py --models llama31_8b --gpus 8

One sample a step, 90 % of a GPU's memory, layouts that pass the rules. Prints a table of estimates, and the settings of
each row to paste behind ``megatron-cp validate --environment gpu``. Runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_cp.common.terminal import say
from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import override, quoted
from megatron_cp.config.recipes import load_recipe
from megatron_cp.estimate.device import Device, load_device
from megatron_cp.planner.figures import words
from megatron_cp.planner.found import Estimated, Models, changes
from megatron_cp.planner.limits import longest_sequence
from megatron_cp.planner.request import environment_of, flat
from megatron_cp.planner.search import Search
from megatron_cp.planner.space import Settings, Space, with_settings
from megatron_cp.rules.memory import NEARLY_FULL
from megatron_cp.rules.remedies import Case

_MODELS = ("llama32_1b", "llama31_8b", "llama31_70b")
_LENGTH, _POSITIONS = NAME.dataset.seq_length, NAME.model.max_position_embeddings
_LONGEST = 2**27
_ONE_SAMPLE: Settings = {NAME.train.global_batch_size: 1, NAME.train.micro_batch_size: 1}
_ALL_HEADS: Settings = {NAME.model.attention_head_groups: 1}
# What the planner may not use, by column.
COLUMNS: dict[str, Settings] = {
    "plain": _ALL_HEADS | {NAME.model.offload_layer_inputs: False, NAME.model.mlp_chunk_size: None},
    "tiles": _ALL_HEADS | {NAME.model.offload_layer_inputs: False},
    "tiles, offload": _ALL_HEADS,
    "tiles, offload, groups of heads": {},
}


@dataclass(frozen=True)
class Longest:
    """The longest sequence of a model and column, with its fastest layout."""

    tokens: int
    best: Estimated
    settings: Settings


def recipe_of(model: str) -> str:
    return f"{model}_pretrain_config"


def _space(model: str, gpus: int, length: int, device: Device, fixed: Settings) -> Space:
    """Return the layouts of one sample of ``length`` tokens a step."""
    node = min(device.gpus_per_node, gpus)
    given = _ONE_SAMPLE | {_LENGTH: length, _POSITIONS: length} | fixed
    config = load_recipe(recipe_of(model), [override(*each) for each in given.items()])
    case = Case(config, gpus, node, environment_of(device, node))
    return Space(with_settings(case, {NAME.train.check_memory: False}), fixed.keys(), node)


def longest(model: str, gpus: int, device: Device, fixed: Settings) -> Longest | None:
    """Return the longest sequence; None if no length fits.

    In steps of a quarter of a power of two.
    """
    usable, models = NEARLY_FULL * device.memory, Models.on(device, min(device.gpus_per_node, gpus))
    power = longest_sequence(_space(model, gpus, 2 * _LONGEST, device, fixed), usable, models)
    for length in (power * 7 // 4, power * 3 // 2, power * 5 // 4, power) if power else ():
        space = _space(model, gpus, length, device, fixed)
        found = Search(space, usable, models).run(1).fitting
        if found:
            changed = changes(flat(load_recipe(recipe_of(model)).given()), found[0].settings)
            return Longest(length, found[0], changed | _ONE_SAMPLE | {_LENGTH: length, _POSITIONS: length})
    return None


def _rows(arguments: argparse.Namespace, device: Device) -> Iterator[tuple[str, str]]:
    """Yield the row of each model and number of GPUs, and its settings."""
    for model in arguments.models:
        for gpus in arguments.gpus:
            cells, pasted = [model, str(gpus)], ""
            for name, fixed in COLUMNS.items():
                found = longest(model, gpus, device, fixed)
                if found is None:
                    cells += ["none", "", "", ""]
                    continue
                memory = found.best.memory
                cells += [
                    f"{found.tokens / 2**20:.3g}M" if found.tokens >= 2**20 else f"{found.tokens / 2**10:.3g}K",
                    f"{found.best.time.seconds:,.0f}",
                    f"{memory.host / 2**30:.0f}",
                    words(found.best.settings, gpus),
                ]
                typed = " ".join(quoted(override(*each)) for each in found.settings.items())
                pasted += f"# {name}\n--recipe {recipe_of(model)} --world-size {gpus} {typed}\n"
            yield "| " + " | ".join(cells) + " |", pasted


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--gpus", nargs="+", type=int, default=(1, 8, 64))
    parser.add_argument("--gpu", default="h100")
    arguments = parser.parse_args(argv)
    device = load_device(arguments.gpu)
    header: list[Any] = ["model", "GPUs"]
    for name in COLUMNS:
        header += [f"tokens {name}", "step s", "host GiB", "layout"]
    say(f"Estimated; {device.name}, {device.memory / 2**30:.0f} GiB.\n")
    say("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    settings = []
    for row, pasted in _rows(arguments, device):
        say(row)
        settings.append(pasted)
    say("\n" + "".join(settings))


if __name__ == "__main__":
    main()
