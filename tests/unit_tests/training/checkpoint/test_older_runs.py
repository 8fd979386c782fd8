"""Runs of an earlier version resume to the same numbers.

See :mod:`tests.older_runs.make`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.older_runs.make import CASES, HERE, LAST, SAVED, arguments, numbers


@pytest.mark.parametrize("name", CASES)
def test_an_older_run_resumes_to_the_same_numbers(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutil.copytree(HERE / name, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    recipe, *settings = arguments(name)[1:]
    code, text = cli(*settings, recipe=recipe)
    assert code == 0 and f"resumed from iteration {SAVED}" in text, text
    found = {line["iteration"]: line for line in numbers(tmp_path / "run")}
    for line in json.loads((HERE / name / "came_to.json").read_text()):
        # Bit for bit on the kind of processor that wrote it; others sum in another order.
        assert found[line["iteration"]] == pytest.approx(line, rel=2e-6)
    assert sorted(found) == list(range(1, LAST + 1))
