"""Sequence for heads and back, around a Mamba layer's scan, over the ranks of a context-parallel group.

Before: a rank has its zigzag part of the tokens with all of its heads. In between: all tokens, in their order, with the
part of the heads that :class:`MambaShape` gives it. As upstream's MambaContextParallel, in one message instead of five.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megatron_cp.attention.comm import Peers, permute_rows
from megatron_cp.attention.sharding import Layout, read_offsets, regroup_order
from megatron_cp.models.mamba_shape import MambaShape


def token_layout(packed: PackedSeqParams | None, rows: int, size: int) -> Layout:
    """How the tokens lie on ``size`` ranks of ``rows`` tokens each.

    Raises:
        ValueError: the rows are not those of the pack, or not two equal chunks.
    """
    if packed is None:
        if size > 1 and rows % 2:
            raise ValueError(f"a Mamba layer got {rows} rows: a zigzag shard is two equal chunks, so an even number")
        return Layout.dense(rows * size, size)
    padded = packed.cu_seqlens_q_padded
    lengths = read_offsets(packed.cu_seqlens_q)
    layout = Layout.packed(lengths, None if padded is None else read_offsets(padded), size)
    if layout.rows != rows:
        raise ValueError(
            f"a Mamba layer got {rows} rows, but the pack's sequences occupy {sum(layout.padded)} tokens, which is "
            f"{layout.rows} on each of {size} ranks"
        )
    return layout


@functools.lru_cache(maxsize=256)
def sequences_of(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Of each token of a pack, in order: the number of its sequence (int32 [t]), and whether it is padding (bool)."""
    numbers = np.repeat(np.arange(len(layout.padded), dtype=np.int32), layout.padded)
    padding = np.ones(len(numbers), dtype=bool)
    starts = np.cumsum([0, *layout.padded])
    for start, length in zip(starts, layout.lengths, strict=False):
        padding[start : start + length] = False
    return numbers, padding


def sequence_to_heads(x: Tensor, shape: MambaShape, layout: Layout, peers: Peers) -> Tensor:
    """[s_local, b, features of all heads] -> [s, b, features of this rank's share], in the order of the tokens.

    ``x`` is the input projection's output; what it holds is ``shape.projected``. Differentiable.
    """
    if peers.size == 1:
        return x
    units = [shape.heads, shape.heads, shape.groups, shape.groups, shape.heads]
    parts = zip(x.split(shape.projected, dim=-1), units, strict=True)
    outgoing = torch.cat([_for_each_rank(part, count, peers.size) for part, count in parts], dim=-1)
    received = all_to_all(peers.group, outgoing.movedim(2, 0).flatten(0, 1))
    return permute_rows(received, regroup_order(layout, peers.size))


def heads_to_sequence(y: Tensor, layout: Layout, peers: Peers) -> Tensor:
    """[s, b, inner of this rank's share] -> [s_local, b, inner of all heads]: the way back. Differentiable."""
    if peers.size == 1:
        return y
    outgoing = permute_rows(y, regroup_order(layout, peers.size), inverse=True)
    received = all_to_all(peers.group, outgoing)
    return received.unflatten(0, (peers.size, -1)).movedim(0, 2).flatten(2)


def share_of(parameter: Tensor, sizes: Sequence[int], units: Sequence[int], peers: Peers) -> Tensor:
    """This rank's share of a parameter along its first dim, which holds parts of ``sizes``, of so many ``units`` each.

    Units are heads or groups; of fewer groups than ranks, neighbouring ranks take the same one. Differentiable: the
    gradients of a rank are zero outside its share, and their sum over the ranks is the whole one.
    """
    if peers.size == 1:
        return parameter
    shares = []
    for part, count in zip(parameter.split(list(sizes)), units, strict=True):
        pieces = min(count, peers.size)
        shares.append(part.chunk(pieces)[peers.rank * pieces // peers.size])
    return torch.cat(shares)


def _for_each_rank(x: Tensor, units: int, size: int) -> Tensor:
    """[..., features of units] -> [..., size, features of a rank's share of the units]."""
    pieces = min(units, size)
    x = x.unflatten(-1, (pieces, 1, -1))
    return x.expand(*x.shape[:-2], size // pieces, -1).flatten(-3, -2)
