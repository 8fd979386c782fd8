"""The choice of ``cp_comm_type: auto``, rule by rule."""

import pytest

from megatron_cp.attention.transports.select import select_transport

TE = {"transformer_engine": True}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # One rank.
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 1}, ("p2p", None)),
        # In one node, heads divide.
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 4}, ("a2a", None)),
        ({"heads": 32, "kv_heads": 8, "tp": 2, "cp": 4}, ("a2a", None)),
        # Over nodes: the largest all-to-all group that fits, a ring for the rest.
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 32}, ("a2a+p2p", [8, 4])),
        ({"heads": 64, "kv_heads": 8, "tp": 2, "cp": 16}, ("a2a+p2p", [4, 4])),
        # kv heads replicated: 2 per rank, groups of 4 replicate them evenly.
        ({"heads": 64, "kv_heads": 8, "tp": 4, "cp": 8, "gpus_per_node": 16}, ("a2a+p2p", [4, 2])),
        ({"heads": 64, "kv_heads": 8, "tp": 4, "cp": 8, "gpus_per_node": 16} | TE, ("a2a+p2p", [2, 4])),
        # Nothing divides: seven heads on four ranks.
        ({"heads": 7, "kv_heads": 7, "tp": 1, "cp": 4}, ("p2p", None)),
        ({"heads": 7, "kv_heads": 7, "tp": 1, "cp": 4, "seq_length": 131072}, ("p2p", None)),
        ({"heads": 7, "kv_heads": 7, "tp": 1, "cp": 4, "seq_length": 8192}, ("all_gather", None)),
        # Tensor parallelism fills the node: the ring crosses it.
        ({"heads": 64, "kv_heads": 8, "tp": 8, "cp": 4}, ("p2p", None)),
        # Transformer Engine's restrictions.
        (
            {"heads": 64, "kv_heads": 8, "tp": 8, "cp": 4, "window": True} | TE,
            ("all_gather", None),
        ),
        ({"heads": 64, "kv_heads": 8, "tp": 8, "cp": 4, "window": True}, ("p2p", None)),
        (
            {"heads": 64, "kv_heads": 16, "tp": 1, "cp": 16, "softmax_offset": True, "transformer_engine": True},
            ("a2a", None),
        ),
        # Packs: one level, and an all-to-all that fits every group.
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 16, "packed_sizes": {16}} | TE, ("p2p", None)),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 4, "packed_sizes": {4}} | TE, ("a2a", None)),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 4, "packed_sizes": {1, 2, 4, 6}} | TE, ("p2p", None)),
        ({"heads": 7, "kv_heads": 7, "tp": 1, "cp": 4, "seq_length": 8192, "packed_sizes": {4}} | TE, ("p2p", None)),
        ({"heads": 32, "kv_heads": 16, "tp": 1, "cp": 16, "packed_sizes": {16}, "window": True} | TE, ("a2a", None)),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 16, "packed_sizes": {16}}, ("a2a+p2p", [8, 2])),
    ],
)
def test_choice(layout, expected):
    comm_type, sizes, reason = select_transport(**({"gpus_per_node": 8} | layout))
    assert (comm_type, sizes) == expected
    assert reason
    if sizes:
        assert sizes[0] * sizes[1] == layout["cp"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"heads": 30, "kv_heads": 8, "tp": 4, "cp": 2}, "heads=30 is not divisible by tp=4"),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 0}, "cp must be at least 1, got 0"),
        ({"heads": 32, "kv_heads": 8, "tp": 1, "cp": 2, "gpus_per_node": 0}, "gpus_per_node must be at least 1, got 0"),
        (
            {"heads": 6, "kv_heads": 6, "tp": 1, "cp": 4, "softmax_offset": True, "transformer_engine": True},
            "softmax offsets with a2a only, but cp=4 does not divide 6/6 heads",
        ),
    ],
)
def test_transports_that_cannot_be_chosen(layout, message):
    with pytest.raises(ValueError, match=message):
        select_transport(**({"gpus_per_node": 8} | layout))
