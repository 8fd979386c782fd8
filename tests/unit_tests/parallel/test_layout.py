"""Formats of rank tables: complete or abbreviated.

Small worlds have every rank. Large ones are abbreviated, and exact.
"""

import itertools
import re
from typing import Any

import pytest

from megatron_cp.parallel.layout import RankLayout, group_lines
from megatron_cp.parallel.process_groups import _log_groups


def progression(text: str) -> list[int]:
    first, last, step = re.fullmatch(r"(\d+)\.\.(\d+)(?: by (\d+))?", text).groups()
    return list(range(int(first), int(last) + 1, int(step or 1)))


def expanded(text: str) -> list[list[int]]:
    """Return the groups that an abbreviated table stands for."""
    groups, count, size, shifts = re.fullmatch(
        r"(\[.*\]) \((\d+) of (\d+)(?:: the first shifted by (.*))?\)", text
    ).groups()
    shown = [[int(g)] if g.isdigit() else progression(g) for g in re.findall(r"\[([^]]*)\]", groups)]
    ranges = [progression(part) for part in shifts.split(" + ")] if shifts else []
    # The first range varies fastest: product varies its last one fastest.
    found = [[rank + sum(shift) for rank in shown[0]] for shift in itertools.product(*reversed(ranges))]
    assert len(found) == int(count) and {len(g) for g in found} == {int(size)}
    assert shown == (found if len(found) <= 3 else [*found[:2], found[-1]])
    assert (" ... " in groups) == (len(found) > 3)
    return found


def test_every_rank_is_named_in_small_worlds() -> None:
    assert group_lines(RankLayout(4, cp=4, hierarchical=(2, 2))) == [
        "CONTEXT_PARALLEL_GROUP [[0,1,2,3]]",
        "HIERARCHICAL_CONTEXT_PARALLEL_GROUPS a2a=[[0,1],[2,3]] p2p=[[0,2],[1,3]]",
        "DATA_PARALLEL_GROUP [[0],[1],[2],[3]]",
    ]
    assert group_lines(RankLayout(64, cp=64))[0] == f"CONTEXT_PARALLEL_GROUP {[list(range(64))]}".replace(", ", ",")


def test_a_thousand_ranks_are_abbreviated() -> None:
    assert group_lines(RankLayout(1024, tp=8, cp=16, pp=2, hierarchical=(4, 4)))[:2] == [
        "TENSOR_MODEL_PARALLEL_GROUP [0..7] [8..15] ... [1016..1023] (128 of 8: the first shifted by 0..1016 by 8)",
        "CONTEXT_PARALLEL_GROUP [0..120 by 8] [1..121 by 8] ... [903..1023 by 8] "
        "(64 of 16: the first shifted by 0..7 + 0..896 by 128)",
    ]
    assert group_lines(RankLayout(1024, cp=1024))[0] == "CONTEXT_PARALLEL_GROUP [0..1023] (1 of 1024)"


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("levels", [(2, 3), (4, 1), (1, 4), (3, 4)])
def test_an_abbreviated_table_is_exact(order: str, tp: int, levels: tuple[int, int]) -> None:
    for pp, dp, ep in itertools.product((1, 2), (1, 3, 16), (1, 2)):
        cp = levels[0] * levels[1]
        world_size = tp * cp * pp * dp
        if world_size <= 64 or world_size % (ep * pp):
            continue
        layout = RankLayout(world_size, tp=tp, cp=cp, pp=pp, ep=ep, hierarchical=levels, order=order)
        tables = dict(line.split(" ", 1) for line in group_lines(layout))
        a2a, p2p = tables["HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"].removeprefix("a2a=").split(" p2p=")
        assert (expanded(a2a), expanded(p2p)) == layout.hierarchical_groups()
        names = {"CONTEXT": "cp", "DATA": "dp"} | {
            name: family
            for name, family, size in (
                ("TENSOR_MODEL", "tp", tp),
                ("PIPELINE_MODEL", "pp", pp),
                ("EXPERT_MODEL", "ep", ep),
            )
            if size > 1
        }
        assert len(tables) == len(names) + 1
        for name, family in names.items():
            assert expanded(tables[f"{name}_PARALLEL_GROUP"]) == layout.groups(family)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_the_all_to_all_level_is_contiguous(order: str) -> None:
    """The level must lie next to the tensor-parallel ranks.

    These share a node in the usual numbering of ranks.
    """
    for tp in (1, 2):
        layout = RankLayout(48, tp=tp, cp=12, pp=2, hierarchical=(4, 3), order=order)
        a2a, p2p = layout.hierarchical_groups()
        assert all(ranks == list(range(ranks[0], ranks[0] + 4 * tp, tp)) for ranks in a2a)
        assert all(ranks == list(range(ranks[0], ranks[0] + 12 * tp, 4 * tp)) for ranks in p2p)


def test_a_run_logs_these_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    layout = RankLayout(1024, tp=8, cp=16)
    with caplog.at_level("INFO", logger="megatron_cp"):
        _log_groups(layout)
    assert [record.message for record in caplog.records] == group_lines(layout)
    assert sum(map(len, group_lines(layout))) < 1000


@pytest.mark.parametrize(
    ("hierarchical", "message"),
    [
        ((-2, -2), r"hierarchical\[0\] must be an integer of at least 1, got -2"),
        ((2, True, 2), r"hierarchical\[1\] must be an integer of at least 1, got True"),
        ((2.0, 2), r"hierarchical\[0\] must be an integer of at least 1, got 2.0"),
        ("22", r"hierarchical\[0\] must be an integer of at least 1, got '2'"),
        (4, "hierarchical must be a tuple of sizes, got 4"),
        ((2, 3), "multiply to 6, not to the context parallel size 4"),
    ],
)
def test_levels_are_checked_like_the_other_sizes(hierarchical: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankLayout(8, cp=4, hierarchical=hierarchical)
