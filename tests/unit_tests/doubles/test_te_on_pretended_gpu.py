"""Transformer Engine's real Python part on a pretended GPU.

See :mod:`tests.doubles.te_on_cpu` and :mod:`tests.doubles.pretend_gpu`. A separate file, because tests of one file run
one after the other.
"""

from __future__ import annotations

import pytest

from tests.unit_tests.doubles.test_pretend_gpu import GPU, KERNELS, NO_GPU, ORDER, SOME, STEPS, pretend
from tests.unit_tests.doubles.test_te_on_cpu import PACKAGE

EQUIVALENCE = "tests/unit_tests/attention/modules/test_te_equivalence.py"
WITH_TE = {
    "its kernels in our transports": (KERNELS, *GPU, "-k", "te_kernels"),
}
MORE_WITH_TE = {
    "the tests for GPUs": (EQUIVALENCE, *GPU),
    "where the host waits": (STEPS, *SOME, "-k", "hierarchy or gathered or hybrid or question"),
    "more of where the host waits": (STEPS, "-m", "slow", "-k", "hybrid or static"),
    "the order of messages": (ORDER,),
    "layers": ("tests/doubles/te_on_cpu/layers.py",),
}
NEEDS_TE = pytest.mark.skipif(not PACKAGE.is_dir(), reason="needs Transformer Engine's Python part (scripts/setup.sh)")


@NO_GPU
@NEEDS_TE
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", list(WITH_TE))
def test_with_transformer_engine(part: str) -> None:
    pretend(WITH_TE[part], PACKAGE)


@NO_GPU
@NEEDS_TE
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", list(MORE_WITH_TE))
def test_more_with_transformer_engine(part: str) -> None:
    pretend(MORE_WITH_TE[part], PACKAGE)
