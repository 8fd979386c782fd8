"""Pack a group's samples into this rank's shard of a microbatch.

The format is ``thd``: samples follow each other. Under the placement ``zigzag`` each is padded for the group's size and
split in zigzag order over the group; under ``balanced`` most are whole on one rank. Labels and loss masks are the
samples' own, so they never cross documents.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.sharding import partition_indices, send_offsets
from megatron_cp.dynamic_cp.types import is_in_pieces, padded_length, padded_tokens
from megatron_cp.parallel.transfer import pinned

Sample = dict[str, torch.Tensor]
TRAINED = ("tokens", "labels", "loss_mask")  # tensors of a sample, one entry a token


@dataclass
class MicrobatchParams(PackedSeqParams):
    """megatron-core's parameters of a pack, with further groups.

    cp_levels: (a2a, p2p) groups of the two-level transport; None if no layer uses it.
    tp_cp_group: tensor-parallel ranks of all members of ``cp_group``; None if that is ``cp_group`` itself.
    idle: dummy microbatch for lockstep; counts nothing.
    placed: where the tokens are; None for zigzag.
    """

    cp_levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    tp_cp_group: dist.ProcessGroup | None = None
    idle: bool = False
    placed: PlacedLayout | None = None


class BlockGroups(NamedTuple):
    """Process groups of a block of ranks, as in :class:`MicrobatchParams`."""

    cp: dist.ProcessGroup
    levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    tp_cp: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class PackedMicrobatch:
    """One rank's shard of a packed microbatch, in ``[1, t_local]`` tensors.

    ``padding_mask`` is True for padding. ``lengths``: unpadded lengths of the whole group's samples.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    padding_mask: torch.Tensor
    packed_seq_params: MicrobatchParams
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class HostPack:
    """Packed microbatch on the host, without process groups.

    ``tensors`` are those of :class:`PackedMicrobatch`; ``starts`` and ``padded_starts`` are the real and padded
    cumulative lengths, ``[samples + 1]``, of the whole group; a further sequence without tokens pads it to its bucket.
    ``placed`` is None for zigzag; otherwise all padding counts as the last sample's.
    """

    tensors: dict[str, torch.Tensor]
    starts: tuple[int, ...]
    padded_starts: tuple[int, ...]
    cp_size: int
    idle: bool = False
    placed: PlacedLayout | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.starts) if stop > start)

    def places(self, rank: int) -> np.ndarray:
        """Return the place in the padded pack of each token of ``rank``, int64 [t_local]."""
        if self.placed is None:
            return partition_indices(np.array(self.padded_starts), rank, self.cp_size)
        places = self.placed.tokens(rank)
        return np.where(places < 0, self.starts[-1], places)

    def pinned(self, device: torch.device | str) -> HostPack:
        """Return a copy in pinned memory, which :meth:`on` sends without waiting."""
        return replace(self, tensors={key: pinned(value, device) for key, value in self.tensors.items()})

    def on(self, device: torch.device | str, groups: BlockGroups) -> PackedMicrobatch:
        """Return the microbatch on its device, with its groups."""
        local = {key: value.to(device, non_blocking=True) for key, value in self.tensors.items()}
        cu_seqlens = send_offsets(self.starts, device)
        cu_seqlens_padded: Any = send_offsets(self.padded_starts, device)
        if self.placed is not None:  # for rotary embeddings, which receive these lengths only
            cu_seqlens_padded.placed_rows = local["position_ids"][0]
        longest = max(stop - start for start, stop in pairwise(self.padded_starts))
        parameters = MicrobatchParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens_padded,
            cu_seqlens_kv_padded=cu_seqlens_padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            # local_cp_size stays None: the group has the size, and megatron-core's latent attention refuses both.
            cp_group=groups.cp,
            # Transformer Engine before 2.17 does not detect padding after the last sample: wrong with p2p.
            pad_between_seqs=self.starts != self.padded_starts,
            cp_levels=groups.levels,
            tp_cp_group=groups.tp_cp,
            idle=self.idle,
            placed=self.placed,
        )
        return PackedMicrobatch(**local, packed_seq_params=parameters, lengths=self.lengths)


def lay_out(
    samples: Sequence[Sample],
    cp_rank: int,
    cp_size: int,
    *,
    sequence_parallel_size: int = 1,
    placement: str = "zigzag",
    token_buckets: Sequence[int] = (),
    idle: bool = False,
) -> HostPack:
    """Pack ``samples`` for one rank of a group.

    Each sample has 1-D ``tokens``, ``labels`` and ``loss_mask`` of one length. Every rank of the group packs the same
    samples in the same order. Padding has token, label, position and loss mask 0. ``placement``: as
    ``model.packed_placement``. ``token_buckets``: as of the schedule. ``idle`` marks a dummy.
    """
    lengths = [len(sample["tokens"]) for sample in samples]
    real_starts, placed = (0, *accumulate(lengths)), None
    tokens = padded_tokens(lengths, cp_size, sequence_parallel_size, placement=placement, token_buckets=token_buckets)
    if is_in_pieces(placement, cp_size):
        placed = replace(PlacedLayout.balanced(lengths, cp_size), rows=tokens // cp_size)
        starts = (*real_starts[:-1], tokens)
    else:
        starts = (0, *accumulate(padded_length(length, cp_size, sequence_parallel_size) for length in lengths))
        if starts[-1] < tokens:  # an empty sequence, so that no sample is cut differently
            real_starts, starts = (*real_starts, real_starts[-1]), (*starts, tokens)
    whole = _zeros(starts[-1]) | {
        "position_ids": torch.zeros(starts[-1], dtype=torch.int64),
        "padding_mask": torch.ones(starts[-1], dtype=torch.bool),
    }
    for start, length, sample in zip(starts, lengths, samples, strict=False):
        for key in TRAINED:
            whole[key][start : start + length] = sample[key]
        whole["position_ids"][start : start + length] = torch.arange(length)
        whole["padding_mask"][start : start + length] = idle
    pack = HostPack(whole, real_starts, starts, cp_size, idle, placed)
    if cp_size > 1:
        mine = torch.from_numpy(pack.places(cp_rank))
        whole = {key: value[mine] for key, value in whole.items()}
    return replace(pack, tensors={key: value.unsqueeze(0) for key, value in whole.items()})


def dummy_sample(sequence_parallel_size: int = 1) -> Sample:
    """Return a sample without loss, for a rank in lockstep that has no work."""
    return _zeros(padded_length(1, 1, sequence_parallel_size))


def _zeros(length: int) -> Sample:
    dtypes = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32}
    return {key: torch.zeros(length, dtype=dtype) for key, dtype in dtypes.items()}


def mask_problems(loss_mask: torch.Tensor) -> list[str]:
    """Describe invalid values of a loss mask."""
    if bool(((loss_mask == 0) | (loss_mask == 1)).all()):
        return []
    return ["the loss mask has values other than 0 and 1; each token counts for the loss, or does not"]


def checksum_of(batch: Mapping[str, torch.Tensor], start: int = 0) -> int:
    """Return a checksum of a host batch's tensors, continued from ``start``."""
    for key in sorted(batch):
        start = zlib.crc32(batch[key].contiguous().numpy(), start)  # reads the memory, without a copy
    return start
