"""Measure and write the verification cards of recipes.

The page with their table is written too.

python -m tests.verification_cards [RECIPE ...]         measure these recipes, or all, on this machine
python -m tests.verification_cards --page               write the page only
python -m tests.verification_cards --parameters RECIPE  print the number of parameters

People type the commands of a card and what has not been run. Everything else in a card is measured here: the arguments
of a command go to the same program, on forked ranks instead of new interpreters.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_cp.common.terminal import say
from megatron_cp.config.recipes import list_recipes
from megatron_cp.rules.document import table
from tests.card_checks import CHECKS, TOLERANCE, measure, parameters

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "verification"
PAGE = ROOT / "docs" / "reference" / "verification_cards.md"
_MODULE = "tests.verification_cards"


def read(recipe: str) -> dict[str, Any]:
    """Read a recipe's card; a new card has the checks that every recipe has."""
    path = CARDS / f"{recipe}.yaml"
    if path.exists():
        card: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        return card
    return {
        "dry_run": {"command": f"megatron-cp train {recipe} --dry-run --environment gpu"},
        "parameters": {"command": f"python -m {_MODULE} --parameters {recipe}"},
        "not_run": ["training on GPUs"],
    }


def write(recipe: str, commit: str) -> None:
    """Measure every check of a recipe and write its card."""
    card = read(recipe)
    measured = {}
    for kind in [kind for kind in CHECKS if kind in card]:
        command = card[kind]["command"]
        found = measure(kind, command)
        measured[kind] = {"command": command, "expected": CHECKS[kind].expected, "measured": found}
    content = {
        "recipe": recipe,
        **measured,
        "not_run": card["not_run"],
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": _machine(),
    }
    head = f"# Type commands and not_run only, then: python -m {_MODULE} {recipe}\n"
    CARDS.mkdir(exist_ok=True)
    text = yaml.safe_dump(content, sort_keys=False, width=116)
    (CARDS / f"{recipe}.yaml").write_text(head + text, encoding="utf-8")
    say(f"verification/{recipe}.yaml: {', '.join(measured)}", flush=True)


def _machine() -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "megatron-core", "numpy")}
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return {"cpu_cores": os.cpu_count(), "cpu": cpu, "gpus": 0, "python": platform.python_version(), **packages}


def _commit() -> str:
    """Return the measured commit; its code must be unchanged."""
    git = ["git", "-C", str(ROOT)]
    code = ["megatron_cp", "recipes", "configs"]
    changed = subprocess.check_output([*git, "status", "--porcelain", "--", *code], text=True)
    if changed:
        raise SystemExit(f"{_MODULE}: a card names a commit, and files have changed since:\n{changed}Fix: git commit")
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


_HEAD = f"""\
# Verification cards

<!-- Written by `python -m {_MODULE} --page` from verification/*.yaml; change the cards, not this file. -->

Each recipe has a card, `verification/RECIPE.yaml`. It holds commands, results, commit, date and machine, and what has
not been run. Tests run the commands of all cards on CPUs and compare the results
([how to update a card](../../CONTRIBUTING.md#update-a-verification-card)).

The columns:

- `ranks`: the dry run for GPUs passes with that many.
- `parameters`: of the whole model, with the padding of the vocabulary.
- `compared with one rank`: how `megatron-cp verify` was called, on CPUs and at reduced size. It found the layout equal.
- `differences`: the worst relative ones that `verify` found, of the losses and of the gradients.
- `trained`: loss at the first and at the last of a few iterations on a CPU, in the recipe's full size.

Type a command of a card with `.venv` activated, in the root of the repository. A command that trains writes to the
recipe's run folder, and a second run resumes there: `checkpoint.save=FOLDER` names another folder.

Losses and gradient norms are compared with a relative tolerance of {TOLERANCE:.0e}. CPUs differ by rounding only: about
1e-7 in a loss and 1e-6 in a norm, more after a few optimizer steps. The differences between two layouts are rounding
alone, so another machine finds other digits. `verify` judges them by its own tolerances.
"""


def page() -> str:
    """Return the whole page."""
    cards = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(CARDS.glob("*.yaml"))}
    head = ["recipe", "ranks", "parameters", "compared with one rank", "differences", "trained", "not run", "date"]
    return "\n".join([_HEAD, *table(head, (_cells(*each) for each in cards.items())), ""])


def _cells(recipe: str, card: Mapping[str, Any]) -> list[str]:
    found = {kind: card[kind]["measured"] for kind in CHECKS if kind in card}
    compared = differences = trained = ""
    if "verify" in found:
        arguments = card["verify"]["command"].replace(f" {recipe}", "").removeprefix("megatron-cp ")
        compared, worst = f"`{arguments}`", found["verify"]["worst_differences"]
        losses = max(difference for name, difference in worst.items() if "loss" in name)
        differences = f"{losses:.0e}, {worst['worst gradient']:.0e}"
    if "train" in found:
        first, last = found["train"]["first"], found["train"]["last"]
        trained = f"{first['lm_loss']:.4f}, {last['lm_loss']:.4f} ({last['iteration']} iterations)"
    count = f"{found['parameters']['parameters']:,}"
    ranks = str(found["dry_run"]["ranks"])
    row = [f"`{recipe}`", ranks, count, compared, differences, trained]
    return [*row, "; ".join(card["not_run"]), str(card["date"])]


def main(arguments: list[str]) -> None:
    """Measure, write the cards and the page."""
    parser = argparse.ArgumentParser(f"python -m {_MODULE}", description="Measure and write verification cards.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="the recipes to measure (default: all)")
    parser.add_argument("--page", action="store_true", help="write the page from the cards; measure nothing")
    parser.add_argument("--parameters", metavar="RECIPE", help="print the number of parameters; write nothing")
    args = parser.parse_args(arguments)
    if args.parameters:
        say(parameters([args.parameters])["parameters"])
        return
    commit = "" if args.page else _commit()
    for recipe in [] if args.page else args.recipes or list_recipes():
        write(recipe, commit)
    PAGE.write_text(page(), encoding="utf-8")
    say(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
