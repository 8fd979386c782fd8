"""The release check accepts this clone (slow), and reports what is missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import megatron_cp

ROOT = Path(__file__).parents[2]


def release_check(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "scripts/release_check.sh", *arguments], capture_output=True, text=True, check=False, timeout=1700
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_this_clone_passes_the_release_check(tmp_path: Path) -> None:
    done = release_check(ROOT, str(tmp_path / "dist"))
    assert done.returncode == 0, done.stdout + done.stderr
    version = megatron_cp.__version__
    assert f"== megatron-cp {version} can be released" in done.stdout
    made = {path.name for path in (tmp_path / "dist").iterdir()}
    assert made == {f"megatron_cp-{version}.tar.gz", f"megatron_cp-{version}-py3-none-any.whl"}


def test_a_missing_part_is_an_error_with_a_fix(tmp_path: Path) -> None:
    for name in ("scripts/release_check.sh", "megatron_cp/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    done = release_check(tmp_path)
    assert done.returncode == 1 and ".venv: not there. Fix: scripts/setup.sh" in done.stderr
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"## [{megatron_cp.__version__}]", "## [9.9.9]"))
    done = release_check(tmp_path)
    assert done.returncode == 1 and "no entry for version" in done.stderr and "Fix: add '## [" in done.stderr
