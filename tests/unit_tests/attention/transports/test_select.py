"""Which transports ``cp_comm_type: auto`` may choose, restriction by restriction."""

from typing import Any

import pytest

from megatron_cp.attention.transports.select import choices, possible_transports

TE = {"transformer_engine": True}
ANY_HEADS = [("p2p", None), ("all_gather", None)]
A2A = ("a2a", None)


def levels(*sizes: list[int]) -> list[Any]:
    return [("a2a+p2p", each) for each in sizes]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # One rank.
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 1}, [("p2p", None)]),
        # Heads divide.
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 4}, [A2A, *levels([2, 2]), *ANY_HEADS]),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 32}, [A2A, *levels([16, 2], [8, 4], [4, 8], [2, 16]), *ANY_HEADS]),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 32} | TE, [*levels([8, 4], [4, 8], [2, 16]), *ANY_HEADS]),
        # kv heads replicated: 2 per rank, groups of 4 replicate them evenly.
        ({"heads": 64, "kv_heads": 8, "tp": 4, "cp": 8}, [A2A, *levels([4, 2], [2, 4]), *ANY_HEADS]),
        ({"heads": 64, "kv_heads": 8, "tp": 4, "cp": 8} | TE, [*levels([2, 4]), *ANY_HEADS]),
        # Nothing divides: seven heads on four ranks.
        ({"heads": 7, "kv_heads": 7, "tp": 1, "cp": 4}, ANY_HEADS),
        # Transformer Engine's restrictions.
        ({"heads": 64, "kv_heads": 8, "tp": 8, "cp": 4, "window": True} | TE, [("all_gather", None)]),
        ({"heads": 64, "kv_heads": 8, "tp": 8, "cp": 4, "window": True}, [A2A, *levels([2, 2]), *ANY_HEADS]),
        ({"heads": 64, "kv_heads": 16, "tp": 1, "cp": 16, "softmax_offset": True} | TE, [A2A]),
        # Packs: one level, and an all-to-all that fits every group.
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 16, "packed_sizes": {16}} | TE, [("p2p", None)]),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 4, "packed_sizes": {4}} | TE, [A2A, ("p2p", None)]),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 4, "packed_sizes": {1, 2, 4, 6}} | TE, [("p2p", None)]),
        ({"heads": 32, "kv_heads": 16, "tp": 1, "cp": 16, "packed_sizes": {16}, "window": True} | TE, [A2A]),
        (
            {"heads": 32, "kv_heads": 8, "tp": 1, "cp": 16, "packed_sizes": {16}},
            [A2A, *levels([8, 2], [4, 4], [2, 8]), *ANY_HEADS],
        ),
    ],
)
def test_what_is_possible(layout: dict[str, Any], expected: list[Any]) -> None:
    found, restricted = possible_transports(**layout)
    assert found == expected
    assert restricted or layout["cp"] > 1


def test_every_pair_of_levels_is_offered() -> None:
    assert [sizes for _, sizes in choices(12) if sizes] == [[6, 2], [4, 3], [3, 4], [2, 6]]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"heads": 30, "kv_heads": 8, "tp": 4, "cp": 2}, "heads=30 is not divisible by tp=4"),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 0}, "cp must be at least 1, got 0"),
        (
            {"heads": 6, "kv_heads": 6, "tp": 1, "cp": 4, "softmax_offset": True, "transformer_engine": True},
            "softmax offsets with a2a only, but cp=4 does not divide 6/6 heads",
        ),
    ],
)
def test_transports_that_cannot_be_chosen(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        possible_transports(**layout)
