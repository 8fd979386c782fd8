"""The passes of a call in stages are those of autograd, to the last bit.

The backward pass starts no forward kernel: it begins from the output and the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_cp.attention.context import CPContext
from megatron_cp.attention.functional import attend_in_context, stages_in_context
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports import all_gather, ring
from megatron_cp.attention.transports.registry import transport_named
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import COMM_TYPES, Case, make_groups

CASES = (
    Case(seq_length=64, kv_heads=2, offset=True),
    Case(seq_length=64, kv_heads=1, window=(11, 0), v_dim=6),
    # Rows after the last sequence, and padding.
    Case(kv_heads=2, cu_seqlens=(0, 13, 40), cu_seqlens_padded=(0, 16, 48), offset=True),
)


def finished(stages: Generator[None, None, Any]) -> tuple[Any, int]:
    """Return the result, and how often it stopped."""
    stops = 0
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value, stops
        stops += 1


def both_ways(comm_type: str) -> None:
    context = CPContext.build(comm_type, make_groups(2) if comm_type == "a2a+p2p" else dist.group.WORLD)
    for case in CASES:
        in_stages(context, case)


def in_stages(context: CPContext, case: Case) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, dout = case.draw()
    mine = [case.shard(x, rank, size).requires_grad_() for x in inputs[:3]]
    mine += [x.requires_grad_() for x in inputs[3:]]
    bounds = [None if x is None else torch.tensor(x) for x in (case.cu_seqlens, case.cu_seqlens_padded)]
    options = {
        "mask": Mask.build(case.causal, case.window),
        "cu_seqlens": bounds[0],
        "cu_seqlens_padded": bounds[1],
        "softmax_offset": mine[3] if case.offset else None,
    }
    expected = attend_in_context(context, *mine[:3], **options)
    grad = case.shard(dout, rank, size)
    gradients = torch.autograd.grad(expected, mine, grad)
    stops = 2 if transport_named(context.comm_type).exchanges_heads else 0
    with torch.no_grad():
        (out, lse), stopped = finished(stages_in_context(context, *mine[:3], **options).forward())
    assert stopped == stops
    assert torch.equal(out.view_as(expected), expected)
    views = [x.view_as(x) for x in mine[:3]]
    with patch.object(ring, "attend", None), patch.object(all_gather, "attend", None):  # no forward kernel
        attention = stages_in_context(context, *views, **options)
        found, stopped = finished(attention.backward(out, lse, grad.view_as(out), mine))
    assert stopped == stops
    for ours, theirs in zip(found, gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_passes_in_stages_are_those_of_autograd(comm_type: str) -> None:
    run_ranks(both_ways, 4, comm_type)
