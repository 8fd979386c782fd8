"""A mixer computed by mamba-ssm's kernel equals ours.

Outputs and all gradients are compared, over ranks and packs. Not collected directly:
``tests/unit_tests/doubles/test_mamba_on_cpu.py`` runs this file in a process that has mamba-ssm.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mamba_ssm.utils.determinism import set_deterministic_mode

from megatron_cp.attention.sharding import partition_indices
from megatron_cp.models.layers.mamba import kernel as mamba
from tests import ranks
from tests.training_runs import train_losses, worst_difference
from tests.unit_tests.models.hybrids import HYBRID
from tests.unit_tests.models.layers.test_mamba import mixer_of, packed, shared_against_alone
from tests.unit_tests.training.layouts.cases import CP2

Overrides = dict[str, Any]

# Three of the kernel's chunks. On two ranks, which pad to multiples of four, a sequence starts with the second rank.
LENGTHS = (3, 123, 1, 171)

# Tolerances of outputs and of gradients, relative to the largest value. In float32 ours are within 1e-6. mamba-ssm adds
# the exponents of a chunk in float32 (ours in float64), and rounds 1 + exp(x) in the time step log(1 + exp(x)). The
# worst errors found are 2e-6 and 1.4e-5. In bf16 one rounding is up to 0.004 of the largest value; the worst errors are
# 0.0101 and 0.0187.
TOLERANCES = {torch.float32: (4e-6, 3e-5), torch.bfloat16: (0.012, 0.04)}


# A head takes a second on an idle machine.
run_ranks = functools.partial(ranks.run_ranks, timeout=280)


class Counted:
    """mamba-ssm's kernel, with the heads and groups of each call."""

    def __init__(self) -> None:
        self.kernel, self.calls = mamba.fused_kernel, []
        mamba.fused_kernel = self

    def __call__(self, x: torch.Tensor, *weights: torch.Tensor, **options: Any) -> torch.Tensor:
        self.calls.append((weights[-1].shape[0], options["ngroups"]))
        return self.kernel(x, *weights, **options)


def check(world: int, overrides: Overrides, dtype: torch.dtype, calls: list[list[tuple[int, int]]], **how: Any) -> None:
    """Check on several ranks. Each rank calls the kernel with these heads and groups."""
    results = run_ranks(packs, world, overrides, dtype, how)
    assert [called for *_, called in results] == calls
    for output, gradient, padding_is_zero, _ in results:
        assert padding_is_zero
        assert output < TOLERANCES[dtype][0] and gradient < TOLERANCES[dtype][1], (output, gradient)


def packs(overrides: Overrides, dtype: torch.dtype, how: dict[str, Any]) -> tuple[float, float, bool, list]:
    """Compare packs with sequences one after the other on one rank.

    The one rank uses our own scan in float64.
    """
    mamba.FUSED_ELEMENTS = how.get("limit", mamba.FUSED_ELEMENTS)
    set_deterministic_mode(how.get("deterministic"))
    counted = Counted()
    rubbish = how.get("rubbish", 3.0)
    return *shared_against_alone(overrides, rubbish, dtype, LENGTHS), counted.calls


def heads(number: int, groups: int, **sizes: int) -> Overrides:
    model = {"num_heads": number, "num_groups": groups} | sizes
    return {f"model__mamba_{name}": value for name, value in model.items()}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_two_ranks(dtype: torch.dtype) -> None:
    check(2, heads(4, 2), dtype, [[(2, 1)], [(2, 1)]])


SHARED: dict[str, tuple[int, Overrides, list[list[tuple[int, int]]]]] = {
    "one rank": (1, heads(4, 2), [[(4, 2)]]),
    "heads that do not divide": (3, heads(8, 2), [[(2, 1)], [(3, 3)], [(3, 1)]]),
    "one group for two ranks": (2, heads(4, 1), [[(2, 1)], [(2, 1)]]),
    "a group a head": (2, heads(4, 4), [[(2, 2)], [(2, 2)]]),
    "sizes that are no powers of two": (2, heads(3, 3, head_dim=24, state_dim=40), [[(1, 1)], [(2, 2)]]),
    "wide heads and states": (1, heads(2, 1, head_dim=64, state_dim=128), [[(2, 1)]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_shared(name: str, dtype: torch.dtype) -> None:
    world, overrides, calls = SHARED[name]
    check(world, overrides, dtype, calls)


SMALL = HYBRID | heads(4, 2, head_dim=8)


def trained(overrides: Overrides, fused: bool) -> list[tuple[float, float]]:
    counted = Counted()
    if not fused:
        mamba.fused_kernel = None
    losses = train_losses(SMALL | overrides, steps=2)
    assert bool(counted.calls) == fused
    return losses


@pytest.mark.slow
def test_a_hybrid_trains_with_it_as_with_our_scan() -> None:
    ours = run_ranks(trained, 1, {}, False)[0]
    for losses in run_ranks(trained, 2, CP2, True):
        assert max(worst_difference(losses, ours)) < 4e-6


@pytest.mark.slow
def test_nan_in_padding_does_not_spread() -> None:
    check(2, heads(4, 2), torch.float32, [[(2, 1)], [(2, 1)]], rubbish=float("nan"))


@pytest.mark.slow
def test_its_deterministic_kernels() -> None:
    check(2, heads(4, 2), torch.float32, [[(2, 1)], [(2, 1)]], deterministic=True)


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        ((3, 1), [(1, 1), (2, 1)]),
        pytest.param((6, 2), [(1, 1), (2, 1), (1, 1), (2, 1)], marks=pytest.mark.slow),
        pytest.param((5, 5), [(1, 1)] * 5, marks=pytest.mark.slow),
    ],
)
def test_sizes_over_the_kernels_limit_are_split(model: tuple[int, int], calls: list[tuple[int, int]]) -> None:
    """Sizes over 128 must be halved.

    Each head has 65 features, each group 32, and a chunk's products 128: a size of 200 is halved.
    """
    check(1, heads(*model, head_dim=32, state_dim=16), torch.float32, [calls], limit=(sum(LENGTHS) + 4) * 200)


def test_our_scan_computes_sizes_that_the_kernel_refuses() -> None:
    """The kernel refuses these sizes: causal-conv1d reads eight channels at a time."""
    check(2, heads(4, 2, head_dim=6, state_dim=8), torch.float32, [[], []])


def dense(dtype: torch.dtype) -> tuple[float, float, list]:
    """Return two sequences in a batch, without a pack."""
    length, counted = 132, Counted()
    mixer, groups = mixer_of(heads(2, 1))
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(length, 2, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    wanted = []
    for row in range(2):
        alone = packed([length], [length], local_cp_size=1)
        out, _ = mixer(x[:, row : row + 1], packed_seq_params=alone)
        out.backward(dout[:, row : row + 1])
        wanted.append(out.detach())
    exact = [parameter.grad for parameter in mixer.parameters()]
    mixer.zero_grad()
    mixer.to(dtype)
    mine = torch.from_numpy(partition_indices(np.array([0, length]), groups.cp.rank(), groups.cp.size()))
    out, _ = mixer(x[mine].to(dtype))
    out.backward(dout[mine].to(dtype))

    def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
        return float((got.double() - expected).abs().max() / expected.abs().max())

    gradients = []
    for parameter, expected in zip(mixer.parameters(), exact, strict=True):
        total = parameter.grad.double()
        dist.all_reduce(total, group=groups.cp)
        gradients.append(difference(total, expected))
    return difference(out, torch.cat(wanted, dim=1)[mine]), max(gradients), counted.calls


def test_without_packs() -> None:
    for output, gradient, calls in run_ranks(dense, 2, torch.float32):
        assert calls == [(1, 1)]
        assert output < 4e-6 and gradient < 3e-5, (output, gradient)
