"""All-gather frees what it no longer needs: each is as large as all ranks' keys."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_cp.attention.context import CPContext
from megatron_cp.attention.functional import attend_in_context
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports import all_gather
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import Case

PACK = Case(kv_heads=2, cu_seqlens=(0, 13, 40), cu_seqlens_padded=(0, 16, 48))


def alive_at_each_copy() -> list[int]:
    """Return how many gathered tensors live when a gradient is put in ranks' order."""
    alive: list[int] = []
    wholes: list[weakref.ref] = []
    gather, total, regroup = all_gather._gather, all_gather.Gradient.total, all_gather.regroup_rows

    def gathered(*arguments: Any) -> Any:
        found = gather(*arguments)
        wholes.extend(weakref.ref(each.untyped_storage()) for each in found)
        return found

    def totalled(gradient: Any) -> torch.Tensor:
        found = total(gradient)
        wholes.append(weakref.ref(found.untyped_storage()))
        return found

    def regrouped(*arguments: Any, inverse: bool = False) -> torch.Tensor:
        if inverse:
            alive.append(sum(each() is not None for each in wholes))
        return regroup(*arguments, inverse=inverse)

    context = CPContext.build("all_gather", dist.group.WORLD)
    inputs, dout = PACK.draw()
    mine = [PACK.shard(x, dist.get_rank(), 2).requires_grad_() for x in inputs[:3]]
    bounds = {name: torch.tensor(getattr(PACK, name)) for name in ("cu_seqlens", "cu_seqlens_padded")}
    with (
        patch.object(all_gather, "_gather", gathered),
        patch.object(all_gather.Gradient, "total", totalled),
        patch.object(all_gather, "regroup_rows", regrouped),
    ):
        out = attend_in_context(context, *mine, mask=Mask.build(True, None), **bounds)
        wholes.clear()  # of the forward pass
        out.backward(PACK.shard(dout, dist.get_rank(), 2))
    return alive


def test_gathered_keys_are_freed_before_gradients_are_copied() -> None:
    """Both gradients are alive at the first copy, one at the second, and keys never."""
    assert run_ranks(alive_at_each_copy, 2) == [[2, 1], [2, 1]]
