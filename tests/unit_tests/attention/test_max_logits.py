"""The largest score of each head equals the naive result.

It is taken over all ranks, and is tested for all transports.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist

from megatron_cp.attention.context import CPContext
from megatron_cp.attention.functional import attend_in_context
from megatron_cp.attention.tiles import Mask
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import COMM_TYPES, Case, make_groups
from tests.unit_tests.attention.test_exactness import CASES

A2A = 2


def written_out(case: Case) -> torch.Tensor:
    """Compute [heads] from all scores of each sequence; -inf where there are none."""
    query, key = case.draw()[0][:2]
    key = key.repeat_interleave(case.heads // case.kv_heads, dim=-2)
    ends = case.cu_seqlens or (0, case.seq_length)
    scale = 1 / math.sqrt(case.qk_dim) if case.scale is None else case.scale
    left, right = case.window or (-1, -1)
    largest = torch.full((case.heads,), -torch.inf, dtype=case.dtype)
    for start, (begin, end) in zip(case.padded or (0,), pairwise(ends), strict=False):
        q, k = (x[start : start + end - begin] for x in (query, key))
        row, column = torch.arange(len(q))[:, None], torch.arange(len(q))
        seen = (row >= column) | (not case.causal)
        seen &= (row - column <= left) | (left < 0)
        seen &= (column - row <= right) | (right < 0)
        if seen.numel():
            scores = torch.einsum("q...hd,k...hd->...hqk", q, k) * scale
            largest = torch.maximum(largest, scores[..., seen].amax(-1).view(-1, case.heads).amax(0))
    return largest


def measured(cases: list[Case]) -> list[list[torch.Tensor]]:
    """Return [heads] of each transport and case, over all ranks.

    Both levels of a2a+p2p are in the world.
    """
    found: list[list[torch.Tensor]] = []
    pair = make_groups(A2A)
    for comm_type in COMM_TYPES:
        found.append([])
        context = CPContext.build(comm_type, pair if comm_type == "a2a+p2p" else dist.group.WORLD)
        for case in cases:
            inputs, _ = case.draw()
            largest = torch.full((case.heads,), -torch.inf, dtype=case.dtype)
            lengths = (case.cu_seqlens, case.cu_seqlens_padded)
            packs = [None if each is None else torch.tensor(each, dtype=torch.int32) for each in lengths]
            attend_in_context(
                context,
                *(case.shard(x, dist.get_rank(), dist.get_world_size()) for x in inputs[:3]),
                mask=Mask.build(case.causal, case.window),
                cu_seqlens=packs[0],
                cu_seqlens_padded=packs[1],
                softmax_scale=case.scale,
                softmax_offset=inputs[3] if case.offset else None,
                max_logits=largest,
            )
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            found[-1].append(largest)
    return found


def test_every_transport() -> None:
    shorter = {name: case if case.cu_seqlens else replace(case, seq_length=32) for name, case in CASES.items()}
    expected = {name: written_out(case) for name, case in shorter.items()}
    for of_transport in run_ranks(measured, 4, list(shorter.values()))[0]:
        for (name, largest), found in zip(expected.items(), of_transport, strict=True):
            torch.testing.assert_close(found, largest, rtol=1e-12, atol=1e-12, msg=name)


def test_long_tiles_in_half_precision() -> None:
    """Scores must be float32 for bfloat16 rows.

    There are more rows than are multiplied at once.
    """
    case = Case(seq_length=1100, batch=1, heads=2, kv_heads=1, dtype=torch.bfloat16)
    query, key = (x.float() for x in case.draw()[0][:2])
    scores = torch.einsum("qbhd,kbcd->bhqk", query, key) / math.sqrt(case.qk_dim)
    expected = scores.masked_fill(torch.ones(1100, 1100).triu(1).bool(), -torch.inf).amax((0, 2, 3))
    largest = torch.full((2,), -torch.inf)
    attend_in_context(CPContext.alone(), *case.draw()[0], mask=Mask.build(True, None), max_logits=largest)
    torch.testing.assert_close(largest, expected, rtol=1e-6, atol=1e-6)
