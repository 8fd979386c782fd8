"""Commands that install further packages, in a clone and for a wheel."""

import shlex
import tomllib
from pathlib import Path

import pytest

from megatron_cp.common import installation
from megatron_cp.launch.process import program

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", ["gpu", "mamba", "wandb"])
def test_fixes_for_extras_name_their_packages(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.clone() == ROOT
    assert installation.how_to_install(extra).startswith("in the clone: ")
    monkeypatch.setattr(installation, "clone", lambda: None)
    words = shlex.split(installation.how_to_install(extra))
    assert words == ["pip", "install", "--no-build-isolation", *EXTRAS[extra]]
    assert installation.how_to_install_requirement("torch") == "pip install torch"


def test_programs_are_named_as_a_shell_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("python", "megatron-cp"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert program("megatron-cp") == str(tmp_path / "bin/megatron-cp")
    assert program("tensorboard", "tensorboard.main") == f"{tmp_path}/bin/python -m tensorboard.main"
    monkeypatch.chdir(tmp_path)
    assert program("megatron-cp") == "bin/megatron-cp"
    monkeypatch.setattr("sys.argv", [str(tmp_path / "other/bin/megatron-cp")])  # of pip install --target
    (tmp_path / "other/bin").mkdir(parents=True)
    (tmp_path / "other/bin/megatron-cp").touch()
    assert program("megatron-cp") == "other/bin/megatron-cp"
    monkeypatch.setattr("sys.argv", ["python"])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert program("megatron-cp") == "megatron-cp"
