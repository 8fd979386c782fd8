"""Exchange of sequence for heads around a Mamba layer's scan.

Before: a rank holds its zigzag shard of the tokens with all heads. After: all tokens in order, with a share of the
heads. Like upstream's MambaContextParallel, but in one message instead of five, and for any number of ranks up to the
number of heads.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megatron_cp.attention.sharding import Layout, read_offsets
from megatron_cp.attention.tables import KEPT, on_device, regroup_rows
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.models.layers.mamba.shape import MambaShape, MambaShare
from megatron_cp.parallel.transfer import send


def token_layout(packed: PackedSeqParams | None, rows: int, size: int) -> Layout:
    """Return the layout of the tokens on ``size`` ranks of ``rows`` tokens each.

    Raises:
        ValueError: the rows do not match the pack, or are not two equal chunks.
    """
    if packed is None:
        if size > 1 and rows % 2:
            raise ValueError(f"Mamba layer: {rows} rows are odd; a zigzag shard has two equal chunks")
        return Layout.dense(rows * size, size)
    padded = packed.cu_seqlens_q_padded
    lengths = read_offsets(packed.cu_seqlens_q)
    layout = Layout.packed(lengths, None if padded is None else read_offsets(padded), size)
    if layout.rows != rows:
        raise ValueError(
            f"Mamba layer: {rows} rows do not match the pack, whose sequences have {sum(layout.padded)} padded tokens, "
            f"{layout.rows} on each of {size} ranks"
        )
    return layout


@functools.lru_cache(maxsize=KEPT)
@torch.inference_mode(False)
def sequences_of(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each token's sequence (int32 [t]), and whether it is padding."""
    numbers = np.repeat(np.arange(len(layout.padded), dtype=np.int32), layout.padded)
    padding = np.ones(len(numbers), dtype=bool)
    starts = np.cumsum([0, *layout.padded])
    for start, length in zip(starts, layout.lengths, strict=False):
        padding[start : start + length] = False
    return on_device(numbers, device), on_device(padding, device)


def sequence_to_heads(x: Tensor, shape: MambaShape, layout: Layout, peers: Peers) -> Tensor:
    """Exchange a shard of the sequence for a share of the heads.

    [s_local, b, features of all heads] becomes [s, b, features of this rank's heads], with tokens in order. ``x`` is
    the input projection's output, with features ``shape.projected``. Differentiable.
    """
    if peers.size == 1:
        return x
    shares = [shape.share(rank, peers.size) for rank in range(peers.size)]
    blocks = [share_of_projections(x, shape, share).flatten() for share in shares]
    received = _exchange(blocks, [blocks[peers.rank].numel()] * peers.size, peers)
    width = sum(shares[peers.rank].shape.projected)
    return regroup_rows(received.view(-1, x.shape[1], width), layout, peers.size)


def heads_to_sequence(y: Tensor, shape: MambaShape, layout: Layout, peers: Peers) -> Tensor:
    """Invert :func:`sequence_to_heads` for ``inner`` features. Differentiable."""
    if peers.size == 1:
        return y
    blocks = regroup_rows(y, layout, peers.size, inverse=True).chunk(peers.size)
    tokens = blocks[0].shape[:2]
    widths = [shape.share(rank, peers.size).shape.inner for rank in range(peers.size)]
    sizes = [tokens.numel() * width for width in widths]
    received = _exchange([block.flatten() for block in blocks], sizes, peers)
    return torch.cat([block.view(*tokens, -1) for block in received.split(sizes)], dim=-1)


def repeat_groups(x: Tensor, share: MambaShare) -> Tensor:
    """Repeat B and C of a share as the scan needs. Differentiable."""
    return _repeat(x, share.shape.projected, slice(2, 4), share)


def share_of_channels(parameter: Tensor, shape: MambaShape, share: MambaShare) -> Tensor:
    """Select a rank's share of a parameter [features of x B C, ...]. Differentiable.

    Gradients of a rank are zero outside its share; their sum over the ranks is the whole gradient.
    """
    features = share_of_projections(parameter.movedim(0, -1), shape, share, slice(1, 4))
    return _repeat(features, share.shape.convolved, slice(1, 3), share).movedim(-1, 0)


def share_of_projections(x: Tensor, shape: MambaShape, share: MambaShare, parts: slice = slice(None)) -> Tensor:
    """Select a rank's heads and groups in [..., z x B C dt], or in ``parts`` of it.

    Differentiable.
    """
    heads, groups = (shape.heads, share.heads), (shape.groups, share.groups)
    kept = []
    units = [heads, heads, groups, groups, heads][parts]
    for part, (count, wanted) in zip(x.split(shape.projected[parts], dim=-1), units, strict=True):
        width = part.shape[-1] // count
        kept.append(part.narrow(-1, wanted.start * width, len(wanted) * width))
    return torch.cat(kept, dim=-1)


def _repeat(x: Tensor, sizes: list[int], of_groups: slice, share: MambaShare) -> Tensor:
    if share.group_of_head is None:
        return x
    index = send(torch.tensor(share.group_of_head), x.device)
    parts = list(x.split(sizes, dim=-1))
    parts[of_groups] = [
        part.unflatten(-1, (len(share.groups), -1)).index_select(-2, index).flatten(-2) for part in parts[of_groups]
    ]
    return torch.cat(parts, dim=-1)


def _exchange(blocks: list[Tensor], sizes: list[int], peers: Peers) -> Tensor:
    """Exchange flat blocks with all ranks, in order of ranks. Differentiable."""
    return all_to_all(peers.group, torch.cat(blocks), sizes, [block.numel() for block in blocks])
