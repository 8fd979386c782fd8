"""Tables of a layout on a device: made and sent once, and then used by all layers of a microbatch."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attention.sharding import Layout, regroup_order
from megatron_cp.parallel.transfer import send

# Tables of each kind that are kept, for the microbatches under way in a pipeline; a table is megabytes.
KEPT = 16


def regroup_rows(x: Tensor, layout: Layout, group_size: int, inverse: bool = False) -> Tensor:
    """Rows of the shards of ``group_size`` ranks, put into the order of their common shard; back with ``inverse``.

    ``x`` is [rows, ...], its rows as in :func:`regroup_order`. Differentiable.
    """
    return x.index_select(0, _regroup_index(layout, group_size, inverse, x.device))


def on_device(table: np.ndarray, device: torch.device) -> Tensor:
    """A copy on ``device``, for which the host does not wait: for the stream that attention runs on, and no other."""
    return send(torch.tensor(table), device)


@functools.lru_cache(maxsize=KEPT)
@torch.inference_mode(False)  # it may be saved for a backward pass later
def _regroup_index(layout: Layout, group_size: int, inverse: bool, device: torch.device) -> Tensor:
    order = regroup_order(layout, group_size).astype(np.int32)
    if inverse:
        back = np.empty_like(order)
        back[order] = np.arange(len(order), dtype=np.int32)
        order = back
    return on_device(order, device)
