"""The code for a GPU, on CPUs: see :mod:`tests.doubles.pretend_gpu`.

Runs in own processes, because pretending affects the whole process.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.doubles.pretend_gpu import VARIABLE
from tests.doubles.te_on_cpu import FOLDER
from tests.unit_tests.doubles.test_te_on_cpu import TRAINING, in_a_process_of_its_own

STAGED = "tests/unit_tests/parallel/test_staged.py"
KERNELS = "tests/unit_tests/attention/kernels/test_kernels.py"
STEPS = "tests/doubles/pretend_gpu/steps.py"
OFFLOAD = "tests/doubles/pretend_gpu/offload.py"
ORDER = "tests/doubles/pretend_gpu/order.py"
GPU = ("-m", "gpu")
SOME = ("-m", "not slow")
PARTS = {"where the host waits, and offloaded inputs": (STEPS, OFFLOAD, *SOME)}
MORE_PARTS = {
    "where the host waits, and offloaded inputs": (STEPS, OFFLOAD, "-m", "slow"),
    # The pretended kernels follow their signatures as we read them: a GPU decides (scripts/gpu_checks.sh).
    "kernels, and the staged backend": (KERNELS, STAGED, *GPU, "-k", "not training and not virtual"),
    "the order of messages": (ORDER,),
    "staged training": (STAGED, *GPU, "-k", "training or virtual"),
    "whole models": (f"{TRAINING}/layouts/test_equivalence.py", *SOME),
    "packs": (f"{TRAINING}/packed/test_equivalence.py", *SOME),
    "dynamic groups": ("tests/unit_tests/dynamic_cp/runtime/test_training.py",),
    "hybrids in dynamic groups": ("tests/unit_tests/dynamic_cp/runtime/test_hybrid_training.py", *SOME),
}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available() or FOLDER in os.environ, reason="pretends that there is a GPU")


def pretend(part: tuple[str, ...], te: Path | None = None) -> None:
    in_a_process_of_its_own({VARIABLE: "1"} | ({FOLDER: str(te)} if te else {}), *part)


@NO_GPU
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", list(PARTS))
def test_fast_checks_on_a_pretended_gpu(part: str) -> None:
    pretend(PARTS[part])


@NO_GPU
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", list(MORE_PARTS))
def test_slow_checks_on_a_pretended_gpu(part: str) -> None:
    pretend(MORE_PARTS[part])
