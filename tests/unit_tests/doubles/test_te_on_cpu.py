"""Our use of Transformer Engine, with its real Python part.

See :mod:`tests.doubles.te_on_cpu`. Runs in its own process, because megatron-core looks for Transformer Engine only on
import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.doubles.te_on_cpu import FOLDER

ROOT = Path(__file__).parents[3]
PACKAGE = Path(sys.prefix) / "te"  # scripts/setup.sh puts it there
PARTS = {
    "layers, and the host's work": (
        "tests/doubles/te_on_cpu/layers.py",
        "tests/doubles/te_on_cpu/host_time.py",
        "-m",
        "not slow",
    ),
}
TRAINING = "tests/unit_tests/training"
MORE_PARTS = {
    "what its version can do": ("tests/doubles/te_on_cpu/support.py",),
    "all layers": ("tests/doubles/te_on_cpu/layers.py", "-m", "slow"),
    "published weights": ("tests/unit_tests/convert/test_runs.py", "-m", "not slow"),
    "every layout": (f"{TRAINING}/layouts/test_equivalence.py", "-m", "not slow"),
    "packs": (f"{TRAINING}/packed/test_equivalence.py", "-m", "not slow"),
    "dynamic groups": ("tests/unit_tests/dynamic_cp/runtime/test_training.py",),
    "hybrids in dynamic groups": ("tests/unit_tests/dynamic_cp/runtime/test_hybrid_training.py", "-m", "not slow"),
}


def in_a_process_of_its_own(variables: dict[str, str], *arguments: str) -> None:
    """Run pytest with these environment variables; fail with its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NVTE_"))}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | variables
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-20000:]}\n{done.stderr[-2000:]}"


def run(*arguments: str) -> None:
    """Run with Transformer Engine's layers for ``attention_backend=auto``."""
    in_a_process_of_its_own({FOLDER: str(PACKAGE)}, *arguments)


NEEDS_IT = pytest.mark.skipif(
    not PACKAGE.is_dir() or torch.cuda.is_available() or FOLDER in os.environ,
    reason="needs Transformer Engine's Python part (scripts/setup.sh) and no GPU",
)


@NEEDS_IT
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", list(PARTS))
def test_with_its_python_part(part: str) -> None:
    run(*PARTS[part])


@NEEDS_IT
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", list(MORE_PARTS))
def test_more_with_its_python_part(part: str) -> None:
    run(*MORE_PARTS[part])
