"""What pipeline stages pass on has the shape that its receiver knows; see ``tests/pretend_gpu/order.py`` too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_cp.parallel import pipeline
from tests.packed_runs import DYNAMIC, LONGEST, lengths_file, packed_losses
from tests.ranks import RanksFailed, run_ranks
from tests.unit_tests.training.layouts import PP2


def out_of_order(lengths: str, overrides: dict[str, Any]) -> None:
    pipeline.get_schedule_table = lambda count, chunks, together: [
        (number, chunk) for chunk in range(chunks) for number in reversed(range(count))
    ]
    packed_losses(lengths, overrides)


def test_a_schedule_in_another_order_is_told(tmp_path: Path) -> None:
    packs = DYNAMIC | PP2 | {"model__max_seqlen_per_dp_cp_rank": LONGEST}
    with pytest.raises(RanksFailed, match=r"RuntimeFault: pipeline rank 0 sends .* to a stage that expects"):
        run_ranks(out_of_order, 2, lengths_file(tmp_path), packs)
