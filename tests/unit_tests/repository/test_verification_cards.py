"""Each recipe has a verification card, whose commands give its results here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_cp.config.recipes import list_recipes
from tests import verification_cards
from tests.card_checks import CHECKS, differing, measure
from tests.verification_cards import CARDS, PAGE, ROOT, page, read, write

ALL = {recipe: read(recipe) for recipe in list_recipes()}
TINY = "llama_tiny_p2p_pretrain_config"
# The others are slow tests; a dry run takes milliseconds.
FAST = {
    "parameters": [TINY, "llama31_405b_pretrain_config", "gemma3_1b_pretrain_config"],
    "verify": ["llama3_8b_pretrain_config"],
    "train": [TINY],
}


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


def cases() -> list[Any]:
    return [
        pytest.param(recipe, kind, id=f"{recipe}-{kind}", marks=[] if recipe in FAST.get(kind, ALL) else SLOW)
        for recipe, card in ALL.items()
        for kind in CHECKS
        if kind in card
    ]


@pytest.mark.parametrize(("recipe", "kind"), cases())
def test_a_command_gives_the_cards_result(recipe: str, kind: str) -> None:
    check = ALL[recipe][kind]
    assert differing(check["measured"], measure(kind, check["command"])) == [], check["command"]


def test_each_recipe_has_a_card_and_each_card_a_recipe() -> None:
    assert [path.stem for path in sorted(CARDS.iterdir())] == sorted(list_recipes())


@pytest.mark.parametrize("recipe", ALL)
def test_a_card_is_complete(recipe: str) -> None:
    card = ALL[recipe]
    assert card["recipe"] == recipe and card["not_run"]
    assert {"dry_run", "parameters", "verify"} <= card.keys() and ("train" in card) == ("tiny" in recipe)
    assert re.fullmatch("[0-9a-f]{40}", card["commit"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", card["date"])
    assert {"cpu_cores", "cpu", "gpus", "python", "torch", "megatron-core"} <= card["machine"].keys()
    for kind in CHECKS.keys() & card.keys():
        assert recipe in shlex.split(card[kind]["command"]) and card[kind]["measured"]
        assert card[kind]["expected"] == CHECKS[kind].expected


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.verification_cards --page"


def test_a_card_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and the list of what was not run must be kept.

    A recipe without a card gets one.
    """
    monkeypatch.setattr(verification_cards, "CARDS", tmp_path / "cards")
    write(TINY, "0" * 40)
    path = tmp_path / "cards" / f"{TINY}.yaml"
    new = yaml.safe_load(path.read_text(encoding="utf-8"))
    for kind in ("dry_run", "parameters"):
        assert new[kind] == ALL[TINY][kind]
    new["dry_run"] = {"command": new["dry_run"]["command"].replace("gpu", "cpu"), "measured": {"ranks": 7}}
    new["not_run"] = ["anything"]
    path.write_text(yaml.safe_dump(new), encoding="utf-8")
    write(TINY, "1" * 40)
    again = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert again["dry_run"]["measured"] == {"ranks": 4, "warnings": 0} and again["dry_run"]["command"].endswith("cpu")
    assert (again["not_run"], again["commit"], again["machine"]) == (["anything"], "1" * 40, new["machine"])


def test_differences_beyond_rounding_are_listed() -> None:
    card = {"last": {"iteration": 4, "lm_loss": 5.8}, "worst_differences": {"loss": 1e-7}}
    assert differing(card, {"last": {"iteration": 4, "lm_loss": 5.8001}, "worst_differences": {"loss": 3e-7}}) == []
    assert len(differing(card, {"last": {"iteration": 3, "lm_loss": 5.81}, "worst_differences": {}})) == 2
    assert len(differing(card, {"last": card["last"]})) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_work_as_typed(tmp_path: Path) -> None:
    """Commands are typed at the repository's root, with the environment activated."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for kind in CHECKS:
        command = ALL[TINY][kind]["command"] + (f" checkpoint.save={tmp_path}" if kind == "train" else "")
        done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        if kind == "parameters":
            assert int(done.stdout) == ALL[TINY][kind]["measured"]["parameters"]
        if kind == "verify":
            assert "EQUAL" in done.stdout
