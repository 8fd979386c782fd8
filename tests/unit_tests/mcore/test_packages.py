"""cuDNN beside Transformer Engine, whose loader prefers a machine's library.

The loader prefers it to the library that PyTorch has loaded.
"""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_cp.common.errors import ConfigError
from megatron_cp.mcore import packages

ROOT = Path(__file__).resolve().parents[3]

# Runs Transformer Engine's own function, without its import, and prints the folders of cuDNN before and after.
_LOAD = """
import ctypes, os, runpy, sys
from contextlib import nullcontext
from megatron_cp.mcore import packages

te, guarded = sys.argv[1:]
before = packages._folders_of_cudnn()
with packages.cudnn_of_pytorch() if guarded == "yes" else nullcontext():
    common = runpy.run_path(te)
    common["_load_cuda_library_from_system"]("cudnn")
    ctypes.CDLL("libcudnn_graph.so.9")  # a part, as Transformer Engine's library needs it
print(*before, "|", *packages._folders_of_cudnn(), "|", os.environ.get("CUDNN_HOME"))
"""


@pytest.mark.parametrize(("guarded", "variables"), [("yes", {}), ("no", {}), ("yes", {"CUDNN_HOME": "machine"})])
def test_transformer_engine_loads_the_cudnn_of_pytorch(guarded: str, variables: dict[str, str], tmp_path: Path) -> None:
    loader = Path(sys.prefix, "te", "transformer_engine", "common", "__init__.py")
    if not loader.is_file():
        pytest.skip("scripts/setup.sh could not install Transformer Engine's Python part")
    machine = tmp_path / "machine"
    machine.mkdir()
    for name in ("libcudnn.so", "libcudnn_graph.so.9"):
        shutil.copy(_ctypes.__file__, machine / name)  # any library
    paths = {name: str(tmp_path / value) for name, value in variables.items()}
    found = subprocess.run(
        [sys.executable, "-c", _LOAD, str(loader), guarded],
        env=os.environ
        | {"LD_LIBRARY_PATH": str(machine), "NVTE_PROJECT_BUILDING": "1", "CUDA_HOME": str(tmp_path / "none")}
        | paths,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, variable = (part.split() for part in found.stdout.strip().split("|"))
    assert len(before) == 1, "PyTorch has no cuDNN of its own"
    chosen_by_hand = bool(variables)
    assert (str(machine) in after) == (guarded == "no" or chosen_by_hand)
    assert set(after) >= set(before)
    assert variable == [paths.get("CUDNN_HOME", "None")]


@pytest.mark.parametrize(
    ("wheel", "cudnn", "error"),
    [
        ("2.17.1", 91900, "2.17.1 is built for cuDNN 9.22: with 9.19 its attention fails in the backward pass"),
        ("2.17.1", 92200, None),
        ("2.16.1", 91900, None),
        (None, 91900, None),
    ],
)
def test_wheels_built_for_a_newer_cudnn_are_refused(
    wheel: str | None, cudnn: int, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcudnn.so.9").touch()
    monkeypatch.setattr(packages, "_folders_of_cudnn", lambda: [str(tmp_path)])
    monkeypatch.setattr(packages.ctypes, "CDLL", lambda path: SimpleNamespace(cudnnGetVersion=lambda: cudnn))

    def version(name: str) -> str:
        if wheel is None:
            raise metadata.PackageNotFoundError(name)
        return wheel

    monkeypatch.setattr(packages.metadata, "version", version)
    with pytest.raises(ConfigError, match=error) if error else nullcontext():
        packages._check_cudnn()


@pytest.mark.parametrize(
    ("variable", "fix"), [("/machine", "fix: unset CUDNN_HOME"), ("", "fix: import megatron_cp before")]
)
def test_two_versions_of_cudnn_are_refused(variable: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_folders_of_cudnn", lambda: ["/machine", "/pytorch"])
    monkeypatch.setenv("CUDNN_HOME", variable)
    with pytest.raises(ConfigError, match=rf"kernels fail: from /machine and /pytorch\s+{fix}"):
        packages._check_cudnn()
