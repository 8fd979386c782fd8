"""Draw an attention problem, run it sharded, and compare with one rank.

It is sharded over the current ranks. The answer of one rank is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.attention import context_parallel_attention
from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.reference import reference_attention
from megatron_cp.attention.sharding import shard_sequence

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True)
class Case:
    """One attention problem. ``seq_length`` is used where ``cu_seqlens`` is None."""

    seq_length: int = 96
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    qk_dim: int = 8
    v_dim: int = 8
    causal: bool = True
    window: tuple[int, int] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    cu_seqlens_padded: tuple[int, ...] | None = None
    scale: float | None = None
    offset: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0
    placed: PlacedLayout | None = None

    @classmethod
    def of_placed(cls, placed: PlacedLayout, **options: Any) -> Case:
        """Build the case of a pack in pieces."""
        return cls(cu_seqlens=(0, *accumulate(placed.lengths)), placed=placed, **options)

    @property
    def padded(self) -> tuple[int, ...] | None:
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    def draw(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Draw unsharded query, key, value, offset and output gradient in ``dtype``."""
        generator = torch.Generator().manual_seed(self.seed)
        lead = (self.seq_length, self.batch) if self.padded is None else (self.padded[-1],)
        shapes = [(self.heads, self.qk_dim), (self.kv_heads, self.qk_dim), (self.kv_heads, self.v_dim)]
        inputs = [torch.randn(*lead, *shape, generator=generator).to(self.dtype) for shape in shapes]
        if self.offset:
            inputs.append(torch.randn(self.heads, generator=generator).to(self.dtype))
        return inputs, torch.randn(*lead, self.heads, self.v_dim, generator=generator).to(self.dtype)

    def reference(self) -> list[torch.Tensor]:
        """Compute the unsharded float64 output and gradients."""
        inputs, dout = self.draw()
        exact = [x.double().requires_grad_() for x in inputs]
        out = reference_of_pack(
            *exact[:3],
            cu_seqlens=self.cu_seqlens,
            cu_seqlens_padded=self.padded,
            causal=self.causal,
            window_size=self.window,
            softmax_scale=self.scale,
            softmax_offset=exact[3] if self.offset else None,
        )
        return [out.detach(), *torch.autograd.grad(out, exact, dout.double())]

    def shard(self, x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return shard_sequence(x, 0, rank, size, self.padded) if self.placed is None else self.placed.shard(x, rank)


def reference_of_pack(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens: Sequence[int] | None = None,
    cu_seqlens_padded: Sequence[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Apply :func:`reference_attention` to each sequence of a pack [t, heads, d].

    Without ``cu_seqlens`` the pack is one sequence.
    """
    if cu_seqlens is None:
        return reference_attention(query, key, value, **options)
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    pieces = []
    for index in range(len(cu_seqlens) - 1):
        start, length = padded[index], cu_seqlens[index + 1] - cu_seqlens[index]
        q, k, v = (x[start : start + length].unsqueeze(1) for x in (query, key, value))
        out = reference_attention(q, k, v, **options).squeeze(1)
        pieces.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padded[index + 1] - start - length)))
    pieces.append(query.new_zeros((query.shape[0] - padded[-1], query.shape[1], value.shape[-1])))
    return torch.cat(pieces)


def make_groups(a2a_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create (a2a, p2p) groups of neighbors over the world. Collective."""
    n, me = dist.get_world_size(), dist.get_rank()
    blocks = [list(range(start, start + a2a_size)) for start in range(0, n, a2a_size)]
    strides = [list(range(start, n, a2a_size)) for start in range(a2a_size)]
    made = [[dist.new_group(ranks) for ranks in level] for level in (blocks, strides)]
    dist.barrier()  # a rank that finishes early must not close connections that others still set up
    a2a = next(group for group, ranks in zip(made[0], blocks, strict=True) if me in ranks)
    return a2a, next(group for group, ranks in zip(made[1], strides, strict=True) if me in ranks)


def run_sharded(case: Case, group, comm_type: str) -> list[torch.Tensor]:
    """Return this rank's output and gradients of query, key and value.

    The gradient of the offset, if there is one, is summed over ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, dout = case.draw()
    mine = [case.shard(x, rank, size).requires_grad_() for x in inputs[:3]]
    offset = inputs[3].requires_grad_() if case.offset else None
    out = context_parallel_attention(
        *mine,
        group=group,
        comm_type=comm_type,
        causal=case.causal,
        window_size=case.window,
        cu_seqlens=(
            None if case.cu_seqlens is None or case.placed else torch.tensor(case.cu_seqlens, dtype=torch.int32)
        ),
        cu_seqlens_padded=(
            None if case.cu_seqlens_padded is None else torch.tensor(case.cu_seqlens_padded, dtype=torch.int32)
        ),
        placed=case.placed,
        softmax_scale=case.scale,
        softmax_offset=offset,
    )
    assert out.dtype == case.dtype and out.shape == (*mine[0].shape[:-1], case.v_dim)
    wanted = [*mine, offset] if offset is not None else mine
    grads = list(torch.autograd.grad(out, wanted, case.shard(dout, rank, size)))
    if offset is not None:
        grads[3] = grads[3].double()
        dist.all_reduce(grads[3])
    return [out.detach(), *grads]


def largest_error(case: Case, group, comm_type: str, expected: list[torch.Tensor] | None = None) -> float:
    """Return the largest difference from the float64 answer.

    Differences of output and of each gradient are relative to its largest value.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    errors = []
    for index, (got, want) in enumerate(
        zip(run_sharded(case, group, comm_type), expected or case.reference(), strict=True)
    ):
        mine = want if index == 4 else case.shard(want, rank, size)
        assert got.isfinite().all()
        largest = want.abs().max().item() if want.numel() else 0.0
        difference = (got.double() - mine).abs().max().item() if mine.numel() else 0.0
        errors.append(difference / largest if largest else difference)
    return max(errors)


def usable(comm_type: str, case: Case, size: int) -> bool:
    """Return whether the heads divide by the all-to-all group."""
    return comm_type != "a2a" or case.heads % size == 0


def run_cases(cases: list[tuple[str, Case]], a2a_size: int) -> list[float]:
    """Return the error of each (transport, case) on this rank. Collective."""
    pair = make_groups(a2a_size) if any(name == "a2a+p2p" for name, _ in cases) else None
    known: dict[Case, list[torch.Tensor]] = {}
    errors = []
    for comm_type, case in cases:
        if case not in known:
            known[case] = case.reference()
        group = pair if comm_type == "a2a+p2p" else dist.group.WORLD
        errors.append(largest_error(case, group, comm_type, known[case]))
        assert not math.isnan(errors[-1]), (comm_type, case)
    return errors
