"""Our use of mamba-ssm, with its real kernels.

See :mod:`tests.doubles.mamba_on_cpu`. Runs in its own process, in which Triton interprets kernels instead of compiling
them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.doubles import mamba_on_cpu, pretend_gpu, te_on_cpu
from tests.unit_tests.doubles.test_te_on_cpu import in_a_process_of_its_own

MIXERS = "tests/doubles/mamba_on_cpu/mixers.py"
PACKAGES = Path(sys.prefix) / "mamba"  # scripts/setup.sh puts them there

pytestmark = pytest.mark.skipif(
    not PACKAGES.is_dir()
    or torch.cuda.is_available()
    or not {mamba_on_cpu.FOLDER, te_on_cpu.FOLDER}.isdisjoint(os.environ),
    reason="needs mamba-ssm's Python part (scripts/setup.sh) and no GPU",
)


def run(*arguments: str, **variables: str) -> None:
    in_a_process_of_its_own({mamba_on_cpu.FOLDER: str(PACKAGES)} | variables, *arguments)


@pytest.mark.timeout(600)
def test_mixers_with_its_kernels() -> None:
    run(MIXERS, "-m", "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_mixers_with_its_kernels() -> None:
    run(MIXERS, "-m", "slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_on_a_pretended_gpu() -> None:
    run("tests/doubles/mamba_on_cpu/gpu.py", **{pretend_gpu.VARIABLE: "1"})
