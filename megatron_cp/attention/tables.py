"""Tables of a layout on a device, shared by all layers of a microbatch."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attention.sharding import Layout, regroup_order
from megatron_cp.parallel.transfer import send

# Number of cached tables of each kind, for the microbatches in a pipeline; a table is megabytes.
KEPT = 16


def regroup_rows(x: Tensor, layout: Layout, group_size: int, inverse: bool = False) -> Tensor:
    """Reorder the rows of joined shards to the common shard's, or back.

    ``x`` is [rows, ...], with rows as in :func:`regroup_order`. Differentiable.
    """
    return x.index_select(0, _regroup_index(layout, group_size, inverse, x.device))


def on_device(table: np.ndarray, device: torch.device) -> Tensor:
    """Copy to ``device`` without waiting, for use on attention's stream only."""
    return send(torch.tensor(table), device)


@functools.lru_cache(maxsize=KEPT)
@torch.inference_mode(False)  # may be saved for a backward pass
def _regroup_index(layout: Layout, group_size: int, inverse: bool, device: torch.device) -> Tensor:
    order = regroup_order(layout, group_size).astype(np.int32)
    if inverse:
        back = np.empty_like(order)
        back[order] = np.arange(len(order), dtype=np.int32)
        order = back
    return on_device(order, device)
