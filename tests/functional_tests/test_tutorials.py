"""Run each tutorial's code blocks, one after the other, in an empty folder.

A block with a title is saved under it; a ``bash`` block is run. Other blocks show other programs' commands, or output.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.M | re.S)


def run_blocks(page: str, folder: Path, chosen: str = "") -> int:
    """Save and run a page's blocks that match ``chosen``; return how many ran."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = 0
    for language, title, text in BLOCK.findall((FOLDER / f"{page}.md").read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
        elif language == "bash" and re.search(chosen, text):
            command = ["bash", "-euo", "pipefail", "-c", text]
            environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            ran += 1
    return ran


def test_there_are_tutorials() -> None:
    assert len(PAGES) >= 6
    assert all(BLOCK.search((FOLDER / f"{page}.md").read_text(encoding="utf-8")) for page in PAGES)


def test_dry_run_commands(tmp_path: Path) -> None:
    assert run_blocks("from_megatron_lm", tmp_path, "--dry-run") == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_runs(page: str, tmp_path: Path) -> None:
    assert run_blocks(page, tmp_path) >= 1
