"""The how-tos of CONTRIBUTING.md: diffs apply, and (slow) commands pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cp.rules import RULES

ROOT = Path(__file__).parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
HOW_TOS = {title: text for title, _, text in (section.partition("\n") for section in SECTIONS) if "```diff\n" in text}


def blocks_of(title: str) -> dict[str, str]:
    """Return the diff, and under "" the commands."""
    return dict(re.findall(r"^```(\w*)\n(.*?)^```$", HOW_TOS[title], flags=re.DOTALL | re.MULTILINE))


def diff_of(title: str) -> str:
    return blocks_of(title)["diff"]


def commands_of(title: str) -> list[str]:
    """Return the lines of Python after the diff, without set-up and whole suites."""
    return [line for line in blocks_of(title)[""].splitlines() if line.startswith("python ")]


def test_there_are_five_how_tos() -> None:
    assert len(HOW_TOS) == 5 and all(map(commands_of, HOW_TOS))


def test_the_rule_of_the_how_to_has_a_free_id() -> None:
    (example,) = re.findall(r'^\+ +"([A-Z]\d+)",$', diff_of("Add a rule"), flags=re.MULTILINE)
    assert example not in RULES


@pytest.mark.parametrize("title", HOW_TOS)
def test_the_diff_applies(title: str) -> None:
    subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=diff_of(title), text=True, check=True)


def install_megatron_core(requirement: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), requirement]
    if subprocess.run(pip, check=False).returncode:
        pytest.skip(f"{requirement} cannot be installed here")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("title", HOW_TOS)
def test_the_commands_pass(title: str, tmp_path: Path) -> None:
    clone, packages = tmp_path / "clone", tmp_path / "packages"
    clone.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, files.decode().split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    subprocess.run(["git", "apply", "-"], cwd=clone, input=diff_of(title), text=True, check=True)
    pinned = re.search(r"^\+ +\"(megatron-core==[\d.]+)\"", diff_of(title), flags=re.MULTILINE)
    if pinned:
        install_megatron_core(pinned[1], packages)
    environment = os.environ | {
        "PYTHONPATH": f"{clone}:{packages}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    for command in commands_of(title):
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
