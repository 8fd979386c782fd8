"""Tensors that attention saves for the backward pass, and its memory.

The memory is measured while attention runs.
"""

import weakref

import pytest
import torch
import torch.distributed as dist

from megatron_cp.attention import context_parallel_attention
from megatron_cp.attention.transports import comm, ring
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import COMM_TYPES, make_groups

S_LOCAL, B, HEADS, KV, QK_DIM, V_DIM = 48, 2, 8, 4, 16, 12


def _saved(comm_type: str) -> int:
    """Count elements in distinct storages that one call's autograd graph keeps."""
    size = dist.get_world_size()
    group = make_groups(2) if comm_type == "a2a+p2p" else dist.group.WORLD
    shapes = ((HEADS, QK_DIM), (KV, QK_DIM), (KV, V_DIM))
    q, k, v = (torch.randn(S_LOCAL, B, heads, dim, requires_grad=True) for heads, dim in shapes)
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = context_parallel_attention(q, k, v, group=group, comm_type=comm_type)
    out.backward(torch.randn_like(out))
    assert size > 1
    return sum(storages.values())


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_saved_for_backward_is_qkv_out_and_lse_for_any_group(comm_type):
    expected = S_LOCAL * B * (HEADS * QK_DIM + KV * QK_DIM + KV * V_DIM + HEADS * V_DIM + HEADS)
    for size in (2, 4):
        assert run_ranks(_saved, size, comm_type) == [expected] * size


def _blocks_alive() -> list[dict[int, int]]:
    """Count received tensors that are alive right after a hop has started.

    Returns the most by tag, forward and backward.
    """
    seen: dict[int, list[weakref.ref]] = {}
    most: dict[int, int] = {}
    original = comm.hop

    def watched(pair, distance, peers, tag):
        arrival = original(pair, distance, peers, tag)
        seen.setdefault(tag, []).extend(weakref.ref(tensor) for tensor in arrival._content)
        alive = {id(reference()) for reference in seen[tag] if reference() is not None}
        most[tag] = max(most.get(tag, 0), len(alive))
        return arrival

    comm.hop = watched
    q, k, v = (torch.randn(32, 1, 2, 8, requires_grad=True) for _ in range(3))
    out = context_parallel_attention(q, k, v, group=dist.group.WORLD)
    forward = dict(most)
    # The last block to arrive is saved for the backward pass.
    seen.clear()
    most.clear()
    out.backward(torch.randn_like(out))
    return [forward, most]


def test_the_ring_holds_two_blocks():
    """A ring may hold the visiting keys and values and the next ones.

    Backward it also holds gradients, which come one block at a time.
    """
    for forward, backward in run_ranks(_blocks_alive, 6):
        assert forward == {comm.KV_TAG: 4}
        assert backward == {comm.KV_TAG: 4, comm.GRAD_TAG: 4}


def _orders(dtype: torch.dtype) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Return the strides in which keys are sent, and in which they are read.

    Sent keys must be contiguous. Forward and backward count.
    """
    sent, read = set(), set()
    hop, attend, attend_backward = comm.hop, ring.attend, ring.attend_backward

    def watched(pair, distance, peers, tag):
        if tag == comm.KV_TAG:
            assert all(tensor.is_contiguous() for tensor in pair)
            sent.add(pair[0].stride())
        return hop(pair, distance, peers, tag)

    def forward(query, key_value, *rest, **into):
        read.add(key_value[0].stride())
        attend(query, key_value, *rest, **into)

    def backward(dout, query, key_value, *rest, **into):
        read.add(key_value[0].stride())
        attend_backward(dout, query, key_value, *rest, **into)

    comm.hop, ring.attend, ring.attend_backward = watched, forward, backward
    mixed = torch.randn(32, 2, 3 * 4, 8, dtype=dtype, requires_grad=True)
    out = context_parallel_attention(*mixed.split(4, dim=2), group=dist.group.WORLD)
    out.backward(torch.randn_like(out))
    return sent, read


@pytest.mark.parametrize(
    ("dtype", "sent", "read"),
    [
        (torch.float32, (1024, 256, 8, 1), (8, 1024, 256, 1)),  # [b, h, s, d]
        (torch.float64, (64, 32, 8, 1), (64, 32, 8, 1)),  # [s, b, h, d], as on GPUs
    ],
)
def test_keys_are_sent_in_reading_order(dtype, sent, read):
    """No stop may copy received keys."""
    assert run_ranks(_orders, 3, dtype) == [({sent}, {read})] * 3
