"""Thousands of steps with random kills, restarts and layout changes. See ``soak``."""

import os
from pathlib import Path

import pytest

from tests.functional_tests.soak import LAYOUTS, soak

ITERATIONS = int(os.environ.get("MEGATRON_CP_SOAK_ITERATIONS", "2000"))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_soak(tmp_path: Path, kind: str) -> None:
    found = soak(kind, ITERATIONS, tmp_path)
    assert found.lives >= 4 and len(found.losses) == ITERATIONS
    assert found.losses[-1] < found.losses[0] - 0.5, "nothing was learned"
    if kind == "same":
        assert found.losses == found.uninterrupted
    else:
        assert found.worst < 1e-5
    assert found.growth < 0.05, found.rss
    kept = [f"iter_{iteration:07d}" for iteration in (ITERATIONS - 40, ITERATIONS)]
    assert ITERATIONS % 40 or found.left == kept, found.left
