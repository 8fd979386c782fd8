"""Files and commands that README.md, docs/ and 3rdparty/ name exist and compose."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_cp.config.recipes import list_recipes, load_recipe
from megatron_cp.rules import check

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
COMMANDS = ROOT / "docs/start/gpus.md"  # the page of the command for GPUs
DOCS = [*ROOT.glob("benchmarks/**/*.md"), ROOT / "3rdparty/README.md", *ROOT.glob("docs/**/*.md")]
PAGES = sorted([*ROOT.glob("*.md"), *DOCS])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_scripts_that_are_named_exist(name: str) -> None:
    for script in set(re.findall(r"(?:scripts|\.ci)/[\w/.]+\w", (ROOT / name).read_text())):
        assert (ROOT / script).exists(), script


def test_recipes_that_are_named_exist() -> None:
    named = set(re.findall(r"--recipe (\w+)(?![.\w/])", README + COMMANDS.read_text()))
    assert len(named) >= 3
    assert named <= set(list_recipes())


def test_the_gpu_command_keeps_every_rule_and_its_small_version_too() -> None:
    page = COMMANDS.read_text()
    (command,) = re.findall(r"^megatron-cp train -n 4 (?:.*\\\n)+.*$", page, flags=re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    recipe, overrides = words[words.index("--recipe") + 1], words[words.index("--recipe") + 2 :]
    assert check(load_recipe(recipe, overrides), 4, environment="gpu") == []
    (small,) = re.findall(r"^  (model.num_layers=2 .*)$", page, flags=re.MULTILINE)
    assert check(load_recipe(recipe, [*overrides, *small.split()]), 4, environment="cpu") == []


def test_versions_are_the_locked_ones() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    page = (ROOT / "3rdparty/README.md").read_text()
    rows = re.findall(r"^\| ([\w, -]+) \| ([\d., ]+)", page, flags=re.MULTILINE)
    checked = 0
    for names, versions in rows:
        for name, stated in zip(names.split(", "), versions.strip(", ").split(", "), strict=False):
            if name != "transformer-engine":
                assert re.search(rf"^{name}=={re.escape(stated.strip())} ", lock, flags=re.MULTILINE), name
                checked += 1
    assert checked >= 15


def test_every_repair_is_listed() -> None:
    page = (ROOT / "3rdparty/README.md").read_text()
    patches = "".join((ROOT / f"megatron_cp/mcore/{name}.py").read_text() for name in ("patches", "rotary"))
    repairs = re.findall(r"^    (\w+/[\w/]+\.py):(\d+)", patches, flags=re.MULTILINE)
    assert len(repairs) == len(re.findall(r"^    _\w+\(\)$", patches, flags=re.MULTILINE)) >= 1
    for path, line in repairs:
        assert re.search(rf"`{re.escape(path)}:[\d, ]*\b{line}\b", page), f"{path}:{line}"


def test_each_result_of_a_benchmark_has_a_command_a_date_and_a_commit() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    tables = re.findall(r"^\| claim \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    rows = [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]
    assert len(rows) >= 20
    for row in rows:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d, [0-9a-f]{8}", row[-1]), row
        assert re.search(r"`(benchmarks/|-)|the same|all sections", row[-2]), row
    for script in re.findall(r"benchmarks/\w+\.\w+", page):
        assert (ROOT / script).exists(), script
