"""The zigzag split: inverse, definition, packs, and refusals."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.attention import sharding
from megatron_cp.attention.sharding import (
    Layout,
    partition_indices,
    read_offsets,
    regroup_order,
    regroup_runs,
    send_offsets,
    shard_sequence,
    unshard_sequence,
)


@st.composite
def packs(draw, max_size: int = 6):
    """Draw (cu_seqlens, cu_seqlens_padded, size).

    Lengths are from empty to longer than the padding rule's unit.
    """
    size = draw(st.integers(1, max_size))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    unit = 2 * size if size > 1 else 1
    padded = [-(-length // unit) * unit + unit * draw(st.integers(0, 2)) for length in lengths]
    return [0, *np.cumsum(lengths).tolist()], [0, *np.cumsum(padded).tolist()], size


def test_zigzag_gives_rank_r_the_chunks_r_and_last_minus_r():
    x = np.arange(16)
    assert [shard_sequence(x, 0, rank, 4).tolist() for rank in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


def test_packs_are_cut_sequence_by_sequence():
    assert partition_indices([0, 8, 8, 12], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert partition_indices([0, 8, 8, 12], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@given(packs())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_token_is_on_exactly_one_rank_and_unshard_undoes_shard(pack):
    _, padded, size = pack
    indices = [partition_indices(padded, rank, size) for rank in range(size)]
    assert len({len(part) for part in indices}) == 1
    assert sorted(np.concatenate(indices).tolist()) == list(range(padded[-1]))
    x = torch.randn(2, padded[-1], 3)
    shards = [shard_sequence(x, 1, rank, size, padded) for rank in range(size)]
    assert torch.equal(unshard_sequence(shards, 1, padded), x)
    assert torch.equal(shards[-1], x[:, partition_indices(torch.tensor(padded), size - 1, size)])


@given(packs())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_spans_are_the_real_tokens_of_partition_indices(pack):
    cu_seqlens, padded, size = pack
    layout = Layout.packed(cu_seqlens, padded, size)
    starts = np.asarray(padded)
    for rank in range(size):
        from_spans = {
            span.row + i: starts[span.sequence] + span.position + i
            for span in layout.spans(rank)
            for i in range(span.length)
        }
        expected = {}
        for row, token in enumerate(partition_indices(padded, rank, size).tolist()):
            sequence = int(np.searchsorted(starts, token, side="right")) - 1
            if token - starts[sequence] < layout.lengths[sequence]:
                expected[row] = token
        assert from_spans == expected


@pytest.mark.parametrize(("size", "group"), [(4, 2), (6, 2), (6, 3), (8, 4), (4, 4), (4, 1)])
def test_shards_of_neighbours_form_the_shard_of_a_smaller_ring(size, group):
    padded = [0, 2 * size, 2 * size, 8 * size]
    layout = Layout.packed(padded, None, size)
    order = regroup_order(layout, group)
    for p in range(size // group):
        together = np.concatenate([partition_indices(padded, p * group + a, size) for a in range(group)])
        assert together[order].tolist() == partition_indices(padded, p, size // group).tolist()


@pytest.mark.parametrize(("size", "group"), [(2, 2), (4, 2), (6, 3), (8, 4), (3, 3), (4, 1)])
def test_a_dense_shard_of_neighbours_is_one_or_two_runs_of_each(size, group):
    layout = Layout.dense(12 * size, size)
    runs = regroup_runs(layout, group)
    assert [len(of_rank) for of_rank in runs] in ([2] * group, [2] * (group - 1) + [1])
    shards = np.arange(group * layout.rows).reshape(group, -1)
    common = np.full(group * layout.rows, -1)
    for rank, of_rank in enumerate(runs):
        for run in of_rank:
            common[run.common] = shards[rank][run.rows]
    assert common.tolist() == regroup_order(layout, group).tolist()


def test_the_shard_of_one_rank_is_the_whole():
    """A copy would not be in the pinned memory that a GPU copies from."""
    x = torch.randn(2, 12)
    assert shard_sequence(x, 1, 0, 1) is x and shard_sequence(x, 1, 0, 1, [0, 5, 12]) is x
    with pytest.raises(ValueError, match="must start at 0"):
        shard_sequence(x, 1, 0, 1, [1, 12])


def test_sharding_is_differentiable():
    x = torch.randn(8, 2, requires_grad=True)
    shard_sequence(x, 0, 1, 2).sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard_sequence(np.zeros(10), 0, 0, 4), "10 along dim 0.*2 \\* cp_size = 8; pad it to 16"),
        (lambda: shard_sequence(np.zeros(8), 1, 0, 4), "dim 1 is out of range"),
        (lambda: shard_sequence(np.zeros(8), 0, 4, 4), r"cp_rank must be in \[0, 4\) .* got 4"),
        (lambda: shard_sequence(np.zeros(8), 0, 0, 0), "cp_size must be at least 1, got 0"),
        (lambda: shard_sequence(np.zeros(9), 0, 0, 2, [0, 8]), "ends at 8 but x has length 9"),
        (lambda: partition_indices([0, 6], 0, 2), "sequence 0 occupies 6 tokens.*= 4; pad it to 8"),
        (lambda: partition_indices([0, 8, 4], 0, 2), r"must start at 0 and never fall, got \[0, 8, 4\]"),
        (lambda: partition_indices([4, 8], 0, 2), "^cu_seqlens_padded must start at 0"),
        (lambda: partition_indices([0.0, 8.0], 0, 2), "^cu_seqlens_padded must be a one-dimensional list of integers"),
        (lambda: Layout.packed([0, 9], [0, 8], 2), "sequence 0 has 9 tokens but cu_seqlens_padded gives it 8"),
        (lambda: Layout.packed([0, 4, 8], [0, 8], 2), "2 sequences, cu_seqlens_padded 1"),
        (lambda: unshard_sequence([], 0), "shards is empty"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_index_maths_needs_no_torch():
    code = (
        "import sys, megatron_cp.attention.transports.select, megatron_cp.attention.tiles;"
        "import megatron_cp.attention.sharding as s;"
        "assert s.shard_sequence(s.np.arange(8), 0, 0, 2).tolist() == [0, 1, 6, 7];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_copied_offsets_are_cached_until_modified():
    sent = send_offsets((0, 8, 20), "cpu")
    assert sent.dtype == torch.int32 and sent.tolist() == [0, 8, 20]
    assert read_offsets(sent) == (0, 8, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "_as_list", lambda *_: pytest.fail("asked the device"))
        assert read_offsets(sent) == (0, 8, 20)
    sent[1] = 12
    assert read_offsets(sent) == (0, 12, 20)
    assert read_offsets(sent.clone()) == (0, 12, 20)
