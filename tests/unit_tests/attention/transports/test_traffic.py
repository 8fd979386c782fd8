"""Each transport sends the bytes of its formula, and no more.

The formulas are in docs/explanation/context_parallel.md.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_cp.attention import context_parallel_attention
from tests.ranks import run_ranks
from tests.unit_tests.attention.counting import SENT, counting_group
from tests.unit_tests.attention.harness import Case, largest_error

S, B, HEADS, KV, DIM = 96, 2, 12, 4, 8


def _count(comm_type: str, dtype: torch.dtype, options: dict) -> tuple[int, int]:
    """Count bytes that this rank sends in the forward and in the backward pass."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if comm_type == "a2a+p2p":
        a2a = [counting_group(list(range(start, start + 2))) for start in range(0, size, 2)][rank // 2]
        ring = [counting_group(list(range(start, size, 2))) for start in range(2)][rank % 2]
        group = a2a, ring
    else:
        group = counting_group(list(range(size)))
    kv_heads = options.pop("kv_heads", KV)
    q, k, v = (torch.randn(S // size, B, h, DIM, dtype=dtype, requires_grad=True) for h in (HEADS, kv_heads, kv_heads))
    SENT.clear()
    out = context_parallel_attention(q, k, v, group=group, comm_type=comm_type, **options)
    forward = SENT.total()
    out.backward(torch.randn_like(out))
    return forward, SENT.total() - forward


def measured(size, comm_type, dtype=torch.float32, **options):
    counts = run_ranks(_count, size, comm_type, dtype, options)
    assert len(set(counts)) == 1, "every rank sends the same"
    return counts[0]


# Numbers in one rank's query (or output), and in its keys and values together.
Q = S * B * HEADS * DIM
KEYS_AND_VALUES = 2 * S * B * KV * DIM


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_ring(size, dtype, width):
    """Keys and values must hop size-1 times, backward with float32 gradients too.

    They have their own heads.
    """
    hops = (size - 1) * KEYS_AND_VALUES // size
    assert measured(size, "p2p", dtype) == (hops * width, hops * (width + 4))


@pytest.mark.parametrize("size", [2, 4])
def test_all_gather(size):
    """Keys and values must go to all others twice.

    Their float32 gradients are summed over ranks and scattered.
    """
    others = (size - 1) * KEYS_AND_VALUES // size
    assert measured(size, "all_gather") == (others * 4, others * 8)


@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all(size):
    """Query, key, value and output must each leave a rank once.

    A rank's own share stays. The gradients do the same.
    """
    once = (2 * Q + KEYS_AND_VALUES) // size * (size - 1) // size
    assert measured(size, "a2a") == (once * 4, once * 4)


def test_all_to_all_sends_a_shared_kv_head_to_each_rank_that_needs_it():
    """Four ranks share one kv head: every other rank must get all of it."""
    size = 4
    q_and_out, kv = 2 * Q // size * (size - 1) // size, 2 * S * B * DIM // size * (size - 1)
    assert measured(size, "a2a", kv_heads=1) == ((q_and_out + kv) * 4, (q_and_out + kv) * 4)


def test_hierarchical():
    """All-to-all must stay within pairs, and the ring must have two ranks.

    The ring exchanges half the heads' keys and values of a pair's tokens.
    """
    a2a = (2 * Q + KEYS_AND_VALUES) // 4 // 2
    ring = KEYS_AND_VALUES // 2 // 2
    assert measured(4, "a2a+p2p") == ((a2a + ring) * 4, (a2a + 2 * ring) * 4)


def test_a_window_saves_empty_hops():
    """A window of one chunk must need two hops, for any size of the ring."""
    hops = 2 * KEYS_AND_VALUES // 6
    assert measured(6, "p2p", window_size=(8, 0)) == (hops * 4, hops * 8)


def test_a_pack_of_separate_sequences_still_travels_once():
    assert set(run_ranks(_count_pack, 2, torch.tensor([0, 48, 96]))) == {2 * 48 * KV * DIM * 4}


def _count_pack(pack: torch.Tensor) -> int:
    group = counting_group([0, 1])
    SENT.clear()
    q, k, v = (torch.randn(48, h, DIM) for h in (HEADS, KV, KV))
    context_parallel_attention(q, k, v, group=group, cu_seqlens=pack)
    return SENT.total()


def _exact() -> float:
    return largest_error(Case(), counting_group([0, 1]), "p2p")


def test_the_counting_group_does_communicate():
    assert max(run_ranks(_exact, 2)) < 1e-12
