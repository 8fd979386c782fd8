"""Multi-token prediction: the targets of each depth, against a naive reference."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor

from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.sharding import partition_indices
from megatron_cp.dynamic_cp.runtime.packing import MicrobatchParams
from megatron_cp.models.layers.mtp import shift_left, unmasked_tokens
from tests.packed_runs import pack
from tests.ranks import run_ranks


def naive_shift(values: list[list[int]], depth: int) -> list[int]:
    """Move each sequence ``depth`` places to the left, with zeros after its end."""
    return [row[i + depth] if i + depth < len(row) else 0 for row in values for i in range(len(row))]


def shifted_of_rank(padded: list[int] | None, length: int, depth: int) -> tuple[list, list]:
    """Return this rank's tokens after ``depth`` shifts, and the expected ones.

    Without a pack there are two rows.
    """
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    sequences = [list(range(1 + 1000 * i, 1 + 1000 * i + n)) for i, n in enumerate(padded or [length])]
    edges = np.cumsum([0, *map(len, sequences)])
    mine = torch.from_numpy(partition_indices(edges, rank, size))
    expected = torch.tensor(naive_shift(sequences, depth))[mine]
    values = torch.tensor([x for row in sequences for x in row])[mine]
    packed = None
    if padded is None:
        values, expected = torch.stack([values, 7 * values]), torch.stack([expected, 7 * expected])
    else:  # the real lengths are shorter than the padded ones
        real = torch.tensor(np.cumsum([0, *[max(1, n - 1) for n in padded]]), dtype=torch.int32)
        packed = PackedSeqParams(cu_seqlens_q=real, cu_seqlens_q_padded=torch.tensor(edges, dtype=torch.int32))
    for _ in range(depth):
        values = shift_left(values, group, packed)
    return values.tolist(), expected.tolist()


def all_shifts() -> list[tuple[list, list]]:
    size = dist.get_world_size()
    packs = [None, [2 * size], [2 * size, 6 * size, 4 * size], [8 * size, 2 * size, 2 * size, 2 * size]]
    return [shifted_of_rank(padded, 8 * size, depth) for padded in packs for depth in (1, 2, 5)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shifting_equals_the_naive_reference(size: int) -> None:
    for results in run_ranks(all_shifts, size):
        for got, expected in results:
            assert got == expected


def upstream_rolls_by_real_lengths() -> list[list[int]]:
    """Shift three documents of 7, 11 and 8 tokens by megatron-core and by us."""
    samples = [
        {"tokens": torch.arange(1, n + 1), "labels": torch.arange(n), "loss_mask": torch.ones(n)} for n in (7, 11, 8)
    ]
    batch = pack(samples, dist.group.WORLD)
    packed = batch.packed_seq_params
    theirs, _ = roll_tensor(batch.tokens, cp_group=dist.group.WORLD, packed_seq_params=packed)
    ours = shift_left(batch.tokens, dist.group.WORLD, packed)
    mine = partition_indices(packed.cu_seqlens_q_padded.numpy(), dist.get_rank(), dist.get_world_size())
    sequences = [
        [*range(1, n + 1), *[0] * (int(b - a) - n)]
        for n, a, b in zip((7, 11, 8), packed.cu_seqlens_q_padded, packed.cu_seqlens_q_padded[1:], strict=False)
    ]
    return [theirs[0].tolist(), ours[0].tolist(), torch.tensor(naive_shift(sequences, 1))[mine].tolist()]


@pytest.mark.parametrize("size", [1, 2])
def test_packed_sequences_are_shifted_by_their_padded_lengths(size: int) -> None:
    """megatron-core's roll follows the real lengths and mixes neighboring documents."""
    results = run_ranks(upstream_rolls_by_real_lengths, size)
    assert all(ours == expected for _, ours, expected in results)
    assert any(theirs != expected for theirs, _, expected in results), "upstream is right: ours is not needed"


def shifted_in_pieces() -> list[tuple[list, list]]:
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for lengths in ([7, 11, 8], [40, 1, 2], [1, 1], [90], [3, 30, 1, 1, 25, 9]):
        sequences = [list(range(1 + 1000 * i, 1 + 1000 * i + n)) for i, n in enumerate(lengths)]
        placed = PlacedLayout.balanced(lengths, size, multiple=2)
        for depth in (1, 2, 5):
            values = placed.shard(torch.tensor([x for row in sequences for x in row]), rank)
            for _ in range(depth):
                values = shift_left(values[None], dist.group.WORLD, MicrobatchParams(placed=placed))[0]
            found.append((values.tolist(), placed.shard(torch.tensor(naive_shift(sequences, depth)), rank).tolist()))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_packs_in_pieces_are_shifted_like_the_whole(size: int) -> None:
    for results in run_ranks(shifted_in_pieces, size):
        for got, expected in results:
            assert got == expected


def counted() -> tuple[list[float], list[float]]:
    """Count unmasked tokens by position, and by shifting the mask."""
    generator = torch.Generator().manual_seed(1)
    samples = [
        {
            "tokens": torch.arange(n),
            "labels": torch.arange(n),
            "loss_mask": (torch.rand(n, generator=generator) < 0.5).float(),
        }
        for n in (1, 2, 3, 9, 30)
    ]
    batch = pack(samples, dist.group.WORLD)
    mask, by_shifting = batch.loss_mask, []
    for _ in range(4):
        by_shifting.append(mask.sum().double())
        mask = shift_left(mask, dist.group.WORLD, batch.packed_seq_params)
    totals = torch.stack([unmasked_tokens(batch.loss_mask, batch.position_ids, 3), torch.stack(by_shifting)])
    dist.all_reduce(totals)
    return totals[0].tolist(), totals[1].tolist()


def test_unmasked_tokens_are_counted_without_shifting() -> None:
    for by_position, by_shifting in run_ranks(counted, 3):
        assert by_position == by_shifting and by_position[0] > by_position[3] > 0
