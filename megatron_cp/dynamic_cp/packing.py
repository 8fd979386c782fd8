"""Samples of one group made into this rank's part of a packed microbatch.

A microbatch is packed as ``thd``: its samples one after the other, each padded to what its group's size asks for and
cut in zigzag order over the group. Labels and loss masks are the samples' own, so they never cross from one document
into the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cp.attention.sharding import partition_indices
from megatron_cp.dynamic_cp.types import padded_length

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PackedMicrobatch:
    """One rank's part of a packed microbatch: ``[1, t_local]`` tensors and what attention needs to know.

    ``lengths`` are the samples' own (unpadded) lengths, of the whole group.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    packed_seq_params: PackedSeqParams
    lengths: tuple[int, ...]

    @property
    def padded_tokens(self) -> int:
        """Tokens of the whole group, padding included."""
        return int(self.packed_seq_params.cu_seqlens_q_padded[-1])


def pack(
    samples: Sequence[Sample],
    group: dist.ProcessGroup,
    *,
    sequence_parallel_size: int = 1,
    device: torch.device | str = "cpu",
) -> PackedMicrobatch:
    """Pack ``samples`` (1-D ``tokens``, ``labels`` and ``loss_mask`` of one length each) for this rank of ``group``.

    Every rank of the group packs the same samples in the same order. Padding has token 0, label 0 and loss mask 0.

    Raises:
        ValueError: a sample is empty, or its labels or loss mask have another length than its tokens.
    """
    cp_size = group.size()
    lengths = [_length_of(index, sample) for index, sample in enumerate(samples)]
    padded = [padded_length(length, cp_size, sequence_parallel_size) for length in lengths]
    starts = [0, *accumulate(padded)]
    whole = {
        "tokens": torch.zeros(starts[-1], dtype=torch.int64),
        "labels": torch.zeros(starts[-1], dtype=torch.int64),
        "loss_mask": torch.zeros(starts[-1], dtype=torch.float32),
        "position_ids": torch.zeros(starts[-1], dtype=torch.int64),
    }
    for start, length, size, sample in zip(starts, lengths, padded, samples, strict=False):
        for key in ("tokens", "labels", "loss_mask"):
            whole[key][start : start + length] = sample[key]
        whole["position_ids"][start : start + size] = torch.arange(size)
    mine = torch.from_numpy(partition_indices(np.array(starts), group.rank(), cp_size))
    local = {key: value[mine].unsqueeze(0).to(device, non_blocking=True) for key, value in whole.items()}
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    cu_seqlens_padded = torch.tensor(starts, dtype=torch.int32, device=device)
    longest = max(padded)
    parameters = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens_padded,
        cu_seqlens_kv_padded=cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=cp_size,
        cp_group=group,
        pad_between_seqs=lengths != padded,
    )
    return PackedMicrobatch(**local, packed_seq_params=parameters, lengths=tuple(lengths))


def dummy_sample(sequence_parallel_size: int = 1) -> Sample:
    """A sample without any loss, for a rank that must keep step with others but has nothing to compute."""
    length = padded_length(1, 1, sequence_parallel_size)
    return {
        "tokens": torch.zeros(length, dtype=torch.int64),
        "labels": torch.zeros(length, dtype=torch.int64),
        "loss_mask": torch.zeros(length, dtype=torch.float32),
    }


def _length_of(index: int, sample: Sample) -> int:
    length = len(sample["tokens"])
    if length == 0:
        raise ValueError(f"sample {index} of the microbatch is empty; leave empty documents out of the data set")
    for key in ("labels", "loss_mask"):
        if len(sample[key]) != length:
            raise ValueError(
                f"sample {index} of the microbatch has {length} tokens but {len(sample[key])} {key}: each token needs "
                "one of each"
            )
    return length
