"""Our models launch as few kernels, with as little Python, as megatron-core's.

Not collected directly: ``tests/unit_tests/doubles/test_te_on_cpu.py`` runs this file in a process in which
megatron-core finds Transformer Engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.te_on_cpu.bare_model import BARE, KINDS, OURS, counts, write_lengths
from tests.doubles.te_on_cpu.host_work import calls_of, launches_of
from tests.ranks import run_ranks

LIMIT = 1.15  # ours over megatron-core's
LAYERS = 16  # of Llama 3.2 1B, the fewest of those that the limit is for


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_does_little_more_than_for_the_bare_model(kind: str, tmp_path: Path) -> None:
    measures = (launches_of, calls_of)
    for found in run_ranks(counts, KINDS[kind].ranks, kind, write_lengths(tmp_path), measures):
        for layer, rest in found:
            assert layer[BARE].total() > 20 and layer[OURS].total() <= LIMIT * layer[BARE].total()
            ours, bare = (rest[side].total() + LAYERS * layer[side].total() for side in (OURS, BARE))
            assert ours <= LIMIT * bare
