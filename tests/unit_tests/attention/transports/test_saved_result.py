"""A second call with a first call's results needs no forward kernel.

The results are the output and the log-sum-exp. The gradients are the same.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_cp.attention.context import CPContext, SavedResult
from megatron_cp.attention.functional import attend_in_context
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports import all_gather, ring
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import COMM_TYPES, Case, make_groups

CASES = (
    Case(seq_length=64, kv_heads=2, offset=True),
    Case(seq_length=64, kv_heads=1, window=(11, 0), v_dim=6),
    # Rows after the last sequence, and padding.
    Case(kv_heads=2, cu_seqlens=(0, 13, 40), cu_seqlens_padded=(0, 16, 48), offset=True),
)


def second_calls(comm_type: str) -> None:
    context = CPContext.build(comm_type, make_groups(2) if comm_type == "a2a+p2p" else dist.group.WORLD)
    for case in CASES:
        second_call(context, case)


def second_call(context: CPContext, case: Case) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, dout = case.draw()
    mine = [case.shard(x, rank, size).requires_grad_() for x in inputs[:3]]
    mine += [x.requires_grad_() for x in inputs[3:]]
    bounds = [None if x is None else torch.tensor(x) for x in (case.cu_seqlens, case.cu_seqlens_padded)]

    def call(saved: SavedResult | None) -> torch.Tensor:
        return attend_in_context(
            context,
            *mine[:3],
            mask=Mask.build(case.causal, case.window),
            cu_seqlens=bounds[0],
            cu_seqlens_padded=bounds[1],
            softmax_offset=mine[3] if case.offset else None,
            saved=saved,
        )

    first = SavedResult()
    out = call(first)
    grad = case.shard(dout, rank, size)
    expected = torch.autograd.grad(out, mine, grad)
    assert first.lse is not None and first.out is None
    known = out.detach() if out.ndim == 4 else out.detach().unsqueeze(1)
    with patch.object(ring, "attend", None), patch.object(all_gather, "attend", None):  # no forward kernel
        again = call(SavedResult(first.lse, known))
    assert torch.equal(again, out)
    for ours, theirs in zip(torch.autograd.grad(again, mine, grad), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_second_call_starts_no_forward_kernel(comm_type: str) -> None:
    run_ranks(second_calls, 4, comm_type)
