"""Run the command in its own process and return its output."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_cp.cli import main
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def ranks_start_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks without a launcher, as the command does."""
    monkeypatch.setenv("MEGATRON_CP_TEST_NO_INIT", "1")


def run_cli(folder: str, arguments: list[str], before: Any) -> tuple[int, str]:
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    if before is not None:
        before(Path(folder))
    path = Path(folder) / "reported"
    sys.stdout = sys.stderr = path.open("w", buffering=1)
    code = main(["convert", *arguments])
    return code, path.read_text()


@pytest.fixture
def convert(tmp_path: Path) -> Any:
    """Return ``convert(arguments...)``, which returns exit code and output.

    ``before(folder)`` runs first, in the command's process.
    """

    def call(*arguments: Any, before: Any = None) -> tuple[int, str]:
        [(code, text)] = run_ranks(run_cli, 1, str(tmp_path), [str(a) for a in arguments], before)
        assert "Traceback" not in text, text
        return code, text

    return call
