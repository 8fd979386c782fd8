"""Every transport against the answer of one rank in float64.

Outputs and all gradients are compared, for a random output gradient.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_cp.attention import context_parallel_attention
from megatron_cp.attention.kernels import cpu as cpu_kernels
from megatron_cp.attention.sharding import shard_sequence, unshard_sequence
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import (
    COMM_TYPES,
    Case,
    largest_error,
    make_groups,
    run_cases,
    run_sharded,
    usable,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
# Drawn softmax scales make scores of up to 20, whose rounding in float32, and that of their log-sum-exp, is in every
# probability of the backward pass; and an offset's gradient is a sum that may cancel.
DRAWN_TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6}
PACK = {"cu_seqlens": (0, 5, 5, 52, 53, 120), "cu_seqlens_padded": (0, 24, 24, 96, 120, 216)}
CASES = {
    "causal": Case(heads=12, kv_heads=12),
    "bidirectional": Case(heads=12, kv_heads=12, causal=False),
    "grouped": Case(heads=12, kv_heads=4),
    "multi-query": Case(heads=12, kv_heads=1),
    "kv heads that the ranks split unevenly": Case(heads=12, kv_heads=6),
    "wide queries": Case(heads=12, kv_heads=2, qk_dim=12, v_dim=8, scale=0.1),
    "wide values": Case(heads=12, kv_heads=12, qk_dim=8, v_dim=12),
    "window": Case(heads=12, kv_heads=4, window=(7, 0)),
    "wide window": Case(heads=12, kv_heads=4, window=(40, 0)),
    "two-sided window": Case(heads=12, kv_heads=4, causal=False, window=(9, 5)),
    "window open to the right": Case(heads=12, kv_heads=4, causal=False, window=(3, -1)),
    "offset": Case(heads=12, kv_heads=4, offset=True),
    "offset and window": Case(heads=12, kv_heads=4, offset=True, window=(11, 0)),
    "scale of 0": Case(heads=12, kv_heads=4, scale=0.0, offset=True),
    "negative scale": Case(heads=12, kv_heads=4, scale=-0.3, offset=True, window=(11, 0)),
    "pack, negative scale": Case(heads=12, kv_heads=4, scale=-1.0, **PACK),
    "pack": Case(heads=12, kv_heads=4, **PACK),
    "pack without padding": Case(heads=12, kv_heads=4, cu_seqlens=(0, 24, 72, 96, 96)),
    "pack, bidirectional": Case(heads=12, kv_heads=4, causal=False, **PACK),
    "pack, window": Case(heads=12, kv_heads=4, window=(9, 0), **PACK),
    "pack, offset, wide queries": Case(heads=12, kv_heads=4, offset=True, qk_dim=12, **PACK),
    "empty pack": Case(heads=12, kv_heads=4, cu_seqlens=(0, 0), cu_seqlens_padded=(0, 24)),
}


@pytest.mark.parametrize(("size", "a2a_size"), [(1, 1), (2, 2), (3, 3), (4, 2), (6, 3)])
def test_all_transports_and_features(size, a2a_size):
    chosen = [
        (comm_type, replace(case, dtype=dtype))
        for case in CASES.values()
        for dtype in (TOLERANCE if size in (2, 4) else [torch.float64])
        for comm_type in COMM_TYPES
    ]
    for errors in run_ranks(run_cases, size, chosen, a2a_size, timeout=280):
        for (comm_type, case), error in zip(chosen, errors, strict=True):
            assert error <= TOLERANCE[case.dtype], (comm_type, case, error)


def _with_scale(scales: list[float]) -> list[list[torch.Tensor]]:
    pair = make_groups(2)
    cases = [Case(scale=scale, dtype=torch.float32) for scale in scales]
    return [
        run_sharded(case, pair if comm_type == "a2a+p2p" else dist.group.WORLD, comm_type)
        for comm_type in COMM_TYPES
        for case in cases
    ]


def test_a_scale_that_float32_rounds_to_0_is_one_of_0():
    for results in run_ranks(_with_scale, 4, [0.0, 1e-300]):
        for zero, tiny in zip(results[::2], results[1::2], strict=True):
            assert all(map(torch.equal, zero, tiny)) and zero[0].isfinite().all() and zero[0].any()


@st.composite
def drawn_cases(draw, size: int) -> Case:
    heads = draw(st.sampled_from([4, 8, 12])) if size != 3 else draw(st.sampled_from([3, 6, 12]))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    window = draw(st.none() | st.tuples(st.integers(-1, 60), st.integers(-1, 60)))
    unit = 2 * size
    lengths = draw(st.none() | st.lists(st.integers(0, 70), min_size=1, max_size=7))
    packed = {}
    if lengths is not None:
        real, padded = [0], [0]
        for length in lengths:
            real.append(real[-1] + length)
            padded.append(padded[-1] + -(-length // unit) * unit + unit * draw(st.integers(0, 2)))
        packed = {"cu_seqlens": tuple(real), "cu_seqlens_padded": tuple(padded)}
    return Case(
        seq_length=unit * draw(st.integers(1, 300 // unit)),
        batch=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=draw(st.sampled_from([8, 16, 20])),
        v_dim=draw(st.sampled_from([8, 16])),
        causal=draw(st.booleans()),
        window=window,
        scale=draw(st.none() | st.floats(0.05, 1.0)),
        offset=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        seed=draw(st.integers(0, 1000)),
        **packed,
    )


@given(st.data())
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_drawn_problems(data):
    size, a2a_size = data.draw(st.sampled_from([(2, 1), (3, 1), (4, 2), (4, 4)]))
    cases = data.draw(st.lists(drawn_cases(size), min_size=6, max_size=6))
    chosen = [(name, case) for case in cases for name in COMM_TYPES if usable(name, case, size)]
    for errors in run_ranks(run_cases, size, chosen, a2a_size):
        for (comm_type, case), error in zip(chosen, errors, strict=True):
            assert error <= DRAWN_TOLERANCE[case.dtype], (comm_type, case, error)


def _replicated(cases: list[Case]) -> list[float]:
    return [largest_error(case, dist.group.WORLD, "a2a") for case in cases]


def test_an_all_to_all_group_may_be_larger_than_the_kv_heads():
    cases = [
        Case(heads=12, kv_heads=kv_heads, causal=causal, **pack)
        for kv_heads in (1, 2, 3)  # three heads for four ranks: some ranks need two of them, shared unevenly
        for causal in (True, False)
        for pack in ({}, PACK)
    ]
    for errors in run_ranks(_replicated, 4, cases):
        assert max(errors) <= 1e-12


def _bits(dtype: torch.dtype) -> list[tuple[str, bool]]:
    """Return whether all-to-all gives the bits of one rank, and of PyTorch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(size)][rank]
    report = []
    for case in (
        Case(seq_length=640, heads=8, kv_heads=8),
        Case(seq_length=640, heads=8, kv_heads=4, causal=False),
        Case(seq_length=640, heads=8, kv_heads=1),  # shared by the ranks: the gradients of keys and values are sums
    ):
        case = replace(case, dtype=dtype)
        kept = 4 if case.kv_heads >= size else 2
        mine = run_sharded(case, dist.group.WORLD, "a2a")
        inputs, dout = case.draw()
        whole = [x.requires_grad_() for x in inputs]
        single = context_parallel_attention(*whole, group=alone, comm_type="p2p", causal=case.causal)
        answers = {"one rank": [single.detach(), *torch.autograd.grad(single, whole, dout)]}
        if dtype == torch.float64:
            q, k, v = (x.permute(1, 2, 0, 3) for x in whole)
            sdpa = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True).permute(2, 0, 1, 3)
            answers["PyTorch"] = [sdpa.detach(), *torch.autograd.grad(sdpa, whole, dout)]
        for name, answer in answers.items():
            report.append(
                (name, all(map(torch.equal, mine[:kept], [case.shard(b, rank, size) for b in answer[:kept]])))
            )
    return report


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_to_all_is_bit_identical_to_one_rank(dtype):
    for report in run_ranks(_bits, 2, dtype):
        assert all(same for _, same in report), report


def _bf16(case: Case) -> dict[str, list[tuple[float, float]]]:
    """Return errors relative to those of bf16 SDPA on one rank.

    Each transport has a list of ratios: output, then gradients.
    """
    size = dist.get_world_size()
    inputs, dout = case.draw()
    whole = [x.requires_grad_() for x in inputs]
    q, k, v = (x.permute(1, 2, 0, 3) for x in whole)
    sdpa = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True).permute(2, 0, 1, 3)
    single_rank = [sdpa.detach(), *torch.autograd.grad(sdpa, whole, dout)]
    exact = case.reference()
    ratios = {}
    pair = make_groups(2)
    for comm_type in COMM_TYPES:
        mine = run_sharded(case, pair if comm_type == "a2a+p2p" else dist.group.WORLD, comm_type)
        ratios[comm_type] = []
        for got, sdpa_answer, truth in zip(mine, single_rank, exact, strict=True):
            shards = [None] * size
            dist.all_gather_object(shards, got.double())
            ours, theirs = unshard_sequence(shards, 0) - truth, sdpa_answer.double() - truth
            ratios[comm_type].append(
                ((ours.norm() / theirs.norm()).item(), (ours.abs().max() / theirs.abs().max()).item())
            )
    return ratios


@pytest.mark.parametrize("fast_bf16", [True, False])  # bf16 kernels in the backward pass, or float32 ones
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_length", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_bf16_is_as_close_to_the_truth_as_one_rank_bf16(causal, seq_length, fast_bf16, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "fast_bf16", lambda: fast_bf16)
    case = Case(seq_length=seq_length, batch=1, heads=4, qk_dim=32, v_dim=32, causal=causal, dtype=torch.bfloat16)
    for comm_type, ratios in run_ranks(_bf16, 4, case)[0].items():
        for name, (norm, largest) in zip(("out", "dq", "dk", "dv"), ratios, strict=True):
            assert norm <= 1.2, (comm_type, name, norm)
            assert largest <= 1.2, (comm_type, name, largest)


def _poisoned(comm_types: tuple[str, ...]) -> dict[str, bool]:
    """Return whether NaN in padding, or in its output gradient, leaves all else clean."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = Case(heads=4, kv_heads=2, offset=True, cu_seqlens=(0, 5, 5, 31), cu_seqlens_padded=(0, 8, 16, 48))
    inputs, dout = case.draw()
    real = torch.zeros(48, dtype=torch.bool)
    for start, length in ((0, 5), (16, 26)):
        real[start : start + length] = True
    exact = case.reference()
    pair, clean = make_groups(2), {}
    for comm_type in comm_types:
        mine = []
        for x in (*inputs[:3], dout):
            x = x.clone()
            x[~real] = float("nan")
            shard = case.shard(x, rank, size)
            mine.append(torch.cat([shard, torch.full((3, *shard.shape[1:]), float("nan"))]))
        *qkv, poisoned_dout = mine
        leaves = [x.requires_grad_() for x in qkv] + [inputs[3].clone().requires_grad_()]
        out = context_parallel_attention(
            *leaves[:3],
            group=pair if comm_type == "a2a+p2p" else dist.group.WORLD,
            comm_type=comm_type,
            cu_seqlens=torch.tensor(case.cu_seqlens),
            cu_seqlens_padded=torch.tensor(case.cu_seqlens_padded),
            softmax_offset=leaves[3],
        )
        grads = list(torch.autograd.grad(out, leaves, poisoned_dout))
        dist.all_reduce(grads[3])
        padding = torch.cat([~case.shard(real, rank, size), torch.ones(3, dtype=torch.bool)])
        ok = torch.allclose(grads[3], exact[4], rtol=0, atol=1e-12)
        for got, want in zip((out.detach(), *grads[:3]), exact, strict=False):
            ok &= bool((got[padding] == 0).all())
            ok &= torch.allclose(got[:-3], case.shard(want, rank, size), rtol=0, atol=1e-12)
        clean[comm_type] = ok
    return clean


def test_nan_in_padding_does_not_leak_and_padding_gets_zeros():
    for clean in run_ranks(_poisoned, 4, COMM_TYPES):
        assert all(clean.values()), clean


def _no_tokens() -> list[tuple[bool, ...]]:
    """Attend in a pack without sequences, whose rows are all padding."""
    pair = make_groups(2)
    results = []
    for comm_type in COMM_TYPES:
        leaves = [torch.full((6, heads, 8), float("nan"), requires_grad=True) for heads in (4, 2, 2)]
        out = context_parallel_attention(
            *leaves,
            group=pair if comm_type == "a2a+p2p" else dist.group.WORLD,
            comm_type=comm_type,
            cu_seqlens=torch.tensor([0]),
        )
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append(tuple(bool((x == 0).all()) for x in (out, *grads)))
    return results


def test_a_pack_without_sequences_gives_zeros():
    for results in run_ranks(_no_tokens, 4):
        assert results == [(True,) * 4] * 4


def _twice(case: Case) -> list[bool]:
    pair = make_groups(2)
    same = []
    for comm_type in COMM_TYPES:
        group = pair if comm_type == "a2a+p2p" else dist.group.WORLD
        first, second = (run_sharded(case, group, comm_type) for _ in range(2))
        same.append(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)))
    return same


def test_two_runs_give_the_same_bits():
    case = Case(seq_length=512, heads=8, kv_heads=2, window=(100, 0), offset=True, dtype=torch.float32)
    for same in run_ranks(_twice, 4, case):
        assert all(same)


class _Shard(torch.autograd.Function):
    """Whole -> this rank's shard; backward puts the ranks' gradients together."""

    @staticmethod
    def forward(ctx, x):
        return shard_sequence(x, 0, dist.get_rank(), dist.get_world_size())

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return unshard_sequence(parts, 0)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return unshard_sequence(parts, 0)

    @staticmethod
    def backward(ctx, grad):
        return shard_sequence(grad, 0, dist.get_rank(), dist.get_world_size())


def _gradcheck() -> list[bool]:
    pair = make_groups(1)
    passed = []
    for comm_type in COMM_TYPES:
        for window in (None, (1, 0)):
            case = Case(seq_length=4, batch=1, heads=2, kv_heads=2, qk_dim=2, v_dim=1)
            inputs, _ = case.draw()

            def whole(*x, comm_type=comm_type, window=window):
                group = pair if comm_type == "a2a+p2p" else dist.group.WORLD
                shards = [_Shard.apply(t) for t in x]
                return _Unshard.apply(
                    context_parallel_attention(*shards, group=group, comm_type=comm_type, window_size=window)
                )

            passed.append(torch.autograd.gradcheck(whole, [x.requires_grad_() for x in inputs]))
    return passed


def test_gradcheck():
    for passed in run_ranks(_gradcheck, 2):
        assert all(passed) and len(passed) == 8


def _gradients_with_a_graph() -> list[str]:
    """Return each transport's error of a second derivative.

    First derivatives must equal those without a graph.
    """
    pair, reported = make_groups(2), []
    for comm_type in COMM_TYPES:
        inputs = [torch.randn(8, 1, 4, 8, requires_grad=True) for _ in range(3)]
        group = pair if comm_type == "a2a+p2p" else dist.group.WORLD
        out = context_parallel_attention(*inputs, group=group, comm_type=comm_type)
        for loss in (out.sum(), out.square().sum()):
            plain = torch.autograd.grad(loss, inputs, retain_graph=True)
            graphed = torch.autograd.grad(loss, inputs, create_graph=True)
            assert all(map(torch.equal, plain, graphed)), comm_type
            try:
                torch.autograd.grad(loss + graphed[0].sum(), inputs, retain_graph=True)
                reported.append(f"{comm_type}: nothing")
            except RuntimeError as error:
                reported.append(str(error))
    return reported


def test_gradients_may_have_a_graph_but_no_derivatives():
    """A second derivative must raise even if it would only be missing from a sum."""
    for reported in run_ranks(_gradients_with_a_graph, 4):
        assert len(reported) == 8 and all("second derivatives are not supported" in text for text in reported), reported
