"""requirements.lock pins every dependency with hashes.

It names no host and fits pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(re.findall(r"^([a-z0-9._-]+)==([^ ;\\]+)", LOCK, flags=re.MULTILINE))


def test_no_host_is_named() -> None:
    assert "://" not in LOCK
    assert "index" not in LOCK
    assert not re.search(r"^(-|--)[a-z]", LOCK, flags=re.MULTILINE)


def test_everything_is_pinned_with_hashes() -> None:
    requirements = re.split(r"\n(?=[a-z0-9])", re.sub(r"^#.*\n", "", LOCK, flags=re.MULTILINE).strip())
    assert len(requirements) == len(PINNED)
    for requirement in requirements:
        assert re.match(r"[a-z0-9._-]+==\S+ .*(\\\n    --hash=sha256:[0-9a-f]{64} ?)+$", requirement), requirement


@pytest.mark.parametrize("text", PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
def test_it_fits_the_project(text: str) -> None:
    requirement = Requirement(text)
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    assert name in PINNED, f"{name} is missing: run scripts/lock.sh"
    assert requirement.specifier.contains(PINNED[name]), f"run scripts/lock.sh: {PINNED[name]} does not fit {text}"
