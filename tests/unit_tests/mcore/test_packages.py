"""cuDNN beside Transformer Engine: its loader prefers a machine's library to the one that PyTorch has loaded."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
