"""The path that a GPU takes, on CPUs: see :mod:`tests.pretend_gpu`.

In processes of their own: what is pretended holds for all of a process.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.pretend_gpu import VARIABLE
from tests.te_on_cpu import FOLDER
from tests.unit_tests.test_te_on_cpu import PACKAGE, TRAINING, in_a_process_of_its_own

STAGED = "tests/unit_tests/parallel/test_staged.py"
KERNELS = "tests/unit_tests/attention/test_kernels.py"
EQUIVALENCE = "tests/unit_tests/attention/test_te_equivalence.py"
STEPS = "tests/pretend_gpu/steps.py"
ORDER = "tests/pretend_gpu/order.py"
GPU = ("-m", "gpu")
SOME = ("-m", "not slow")
PARTS = {
    "where the host waits": (STEPS,),
    "the order of messages": (ORDER, *SOME),
    "kernels, and the staged backend": (KERNELS, STAGED, *GPU, "-k", "not training and not virtual"),
    "whole models": (f"{TRAINING}/test_equivalence.py", *SOME, "-k", "one_rank and (sp or vpp2 or layer)"),
}
WITH_TE = {
    "where the host waits": (STEPS, "-k", "hierarchy or gathered or hybrid or question"),
    "the tests for GPUs": (EQUIVALENCE, *GPU),
}
MORE_PARTS = {
    "the order of messages": (ORDER, "-m", "slow"),
    "staged training": (STAGED, *GPU, "-k", "training or virtual"),
    "whole models": (f"{TRAINING}/test_equivalence.py", *SOME),
    "packs": (f"{TRAINING}/test_packed_equivalence.py", *SOME),
    "dynamic groups": ("tests/unit_tests/dynamic_cp/test_training.py", *SOME),
    "hybrids in dynamic groups": ("tests/unit_tests/dynamic_cp/test_hybrid_training.py", *SOME),
}
MORE_WITH_TE = {
    "the order of messages": (ORDER,),
    "layers": ("tests/te_on_cpu/layers.py",),
}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available() or FOLDER in os.environ, reason="pretends that there is a GPU")
NEEDS_TE = pytest.mark.skipif(not PACKAGE.is_dir(), reason="needs Transformer Engine's Python part (scripts/setup.sh)")


def pretend(part: tuple[str, ...], te: Path | None = None) -> None:
    in_a_process_of_its_own({VARIABLE: "1"} | ({FOLDER: str(te)} if te else {}), *part)


@NO_GPU
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", list(PARTS))
def test_on_a_gpu_that_there_is_not(part: str) -> None:
    pretend(PARTS[part])


@NO_GPU
@NEEDS_TE
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", list(WITH_TE))
def test_with_transformer_engine(part: str) -> None:
    pretend(WITH_TE[part], PACKAGE)


@NO_GPU
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", list(MORE_PARTS))
def test_more_on_a_gpu_that_there_is_not(part: str) -> None:
    pretend(MORE_PARTS[part])


@NO_GPU
@NEEDS_TE
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", list(MORE_WITH_TE))
def test_more_with_transformer_engine(part: str) -> None:
    pretend(MORE_WITH_TE[part], PACKAGE)
