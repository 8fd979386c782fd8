"""Find labels that are the most likely token.

Logits are divided over tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_cp.parallel.collectives import max_over_ranks


def is_most_likely(labels: Tensor, logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return whether no other token has a larger logit than the label: bool [b, s].

    Args:
        labels: int64 [b, s].
        logits: [s, b, v], this rank's part of the vocabulary. Not modified.
        group: the tensor-parallel ranks, each with a part of the same size.
    """
    rows = logits.shape[-1]
    own = labels.transpose(0, 1) - group.rank() * rows
    elsewhere = (own < 0) | (own >= rows)
    of_label = logits.gather(-1, own.clamp(0, rows - 1).unsqueeze(-1)).squeeze(-1)
    largest = torch.stack([logits.amax(dim=-1), of_label.masked_fill(elsewhere, -torch.inf)]).float()
    if group.size() > 1:
        max_over_ranks(largest, group)
    return (largest[1] >= largest[0]).transpose(0, 1).contiguous()
