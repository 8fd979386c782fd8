"""Attention by groups of heads has the gradients of all heads at once.

With overlap they are the same to the last bit. The memory of a group is tested too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.attention.transports import comm, ring
from megatron_cp.models.layers.head_groups import groups as groups_of_heads
from megatron_cp.models.layers.head_groups.attention import HeadGroupsAttention
from megatron_cp.parallel.collectives import sum_over_ranks
from tests.ranks import run_ranks
from tests.training_runs import Losses, start, tiny_config, train_losses
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, SP, TP2, over

Overrides = dict[str, Any]
SINKS = {"model__softmax_type": "learnable", "model__window_size": [9, 0]}
NORMS = {"model__qk_layernorm": True, "model__add_qkv_bias": True}
MANY, FEW = {"model__num_query_groups": 8}, {"model__num_query_groups": 2}
BIASES = {"model__add_bias_linear": True, "model__add_qkv_bias": True}
A2A = CP2 | over("a2a")
LEVELS = HCP | {"model__context_parallel_size": 4}
OVERLAP = {"model__overlap_head_groups": True}
DYNAMIC = {
    "model__dynamic_context_parallel": True,
    "model__sequence_packing_scheduler": "default_dynamic_cp",
    "model__max_seqlen_per_dp_cp_rank": 64,
    "dataset__kind": "mock_documents",
}


class Live(TorchDispatchMode):
    """The most bytes that tensors made in the body held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref, int]] = {}
        self.most = self._now = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self._live:
                key, size = id(storage), storage.nbytes()
                self._live[key] = weakref.ref(storage, lambda dead, key=key: self._forget(key)), size
                self._now += size
                self.most = max(self.most, self._now)
        return output

    def _forget(self, key: int) -> None:
        self._now -= self._live.pop(key)[1]


def gradients(overrides: Overrides, packed: bool = False, length: int = 256) -> tuple[dict[str, torch.Tensor], int]:
    """Return output and gradients in float64, of norm and attention, and peak bytes."""
    run, _ = start(tiny_config(model__num_layers=2, **overrides))
    model = run.model[0].module
    layer = model.decoder.layers[1].double()
    attention, norm = layer.self_attention, layer.input_layernorm
    assert isinstance(attention, HeadGroupsAttention) == (overrides.get("model__attention_head_groups", 1) > 1)
    layout = run.config.model
    rows = (384 if packed else length) // layout.context_parallel_size
    shard = rows // (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    hidden = torch.randn(shard, 1, layout.hidden_size, generator=generator, dtype=torch.float64).requires_grad_()
    packs = None
    if packed:
        bounds, padded = torch.tensor([0, 61, 250, 377]), torch.tensor([0, 64, 256, 384])
        packs = PackedSeqParams("thd", bounds, bounds, padded, padded, 192, 192)
    angles = model.rotary_pos_emb(rows * layout.context_parallel_size, packed_seq=packed)
    # Gradients of a data-parallel wrapper's weights are added where it keeps them: these are asked for instead.
    named = [*attention.named_parameters(), *norm.named_parameters(prefix="norm")]
    names, parameters = zip(*named, strict=True)
    with Live() as live:
        out, bias = attention(norm(hidden), None, rotary_pos_emb=angles, packed_seq_params=packs)
        out = out if bias is None else out + bias
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        found = torch.autograd.grad(out, (hidden, *parameters), weights)
    for name, gradient in zip(names, found[1:], strict=True):
        if "softmax_offset" in name:  # each rank's part is of the heads that it exchanged
            sum_over_ranks(gradient, run.groups.cp)
    run.close()
    return dict(zip(("output", "input", *names), (out.detach(), *found), strict=True)), live.most


@pytest.mark.parametrize(
    ("ranks", "overrides", "groups", "packed"),
    [
        (1, SINKS, 4, False),
        (1, SINKS | FEW | {"model__normalization": "LayerNorm"}, 8, False),
        (1, NORMS, 2, True),
        (2, CP2 | NORMS | FEW, 4, True),
        (4, TP2 | SP | CP2 | NORMS | SINKS, 2, False),
        (2, TP2 | SP | BIASES, 2, True),
        (4, TP2 | SP | A2A | BIASES | SINKS | FEW, 2, False),
        (2, TP2 | BIASES | SINKS, 2, False),
        pytest.param(4, TP2 | CP2 | over("a2a") | MANY, 2, True, marks=pytest.mark.slow),
        (4, HCP | {"model__context_parallel_size": 4} | SINKS, 4, True),
        pytest.param(2, CP2 | over("all_gather") | NORMS, 4, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_those_of_all_heads_at_once(
    ranks: int, overrides: Overrides, groups: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_of_heads, "GATHERED_TOKENS", 25)  # divides nothing
    whole = run_ranks(gradients, ranks, overrides, packed)
    by_groups = run_ranks(gradients, ranks, overrides | {"model__attention_head_groups": groups}, packed)
    for (expected, _), (found, _) in zip(whole, by_groups, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # Only sums over groups are in another order.
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def both(ranks: int, overrides: Overrides, packed: bool) -> None:
    """Compare output and gradients with and without overlap, on one rank."""
    waiting: list[int] = []

    class Watched(comm.PendingReceive):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            waiting.append(id(self))

        def wait(self) -> Any:
            waiting.remove(id(self))  # once
            return super().wait()

    comm.PendingReceive, plain = Watched, comm.PendingReceive
    try:
        (expected, _), (found, _) = (gradients(overrides | more, packed) for more in ({}, OVERLAP))
    finally:
        comm.PendingReceive = plain
    assert not waiting
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("ranks", "overrides", "groups", "packed"),
    [
        (2, A2A | MANY | SINKS, 4, False),
        (2, A2A | NORMS, 2, True),
        (4, CP4 | over("a2a") | NORMS, 2, False),  # each key/value head is on two ranks
        (4, LEVELS | SINKS, 4, True),
        (4, LEVELS | NORMS | MANY, 4, False),
        (4, TP2 | SP | A2A | NORMS | SINKS | {"model__num_query_groups": 4}, 2, False),
        (4, TP2 | A2A | MANY, 2, True),
        (2, A2A | NORMS | FEW, 4, False),
        pytest.param(2, CP2 | over("all_gather") | NORMS, 4, False, marks=pytest.mark.slow),
        pytest.param(2, CP2 | over("p2p"), 2, True, marks=pytest.mark.slow),
        (1, SINKS, 2, True),
    ],
)
def test_overlap_changes_no_bit(ranks: int, overrides: Overrides, groups: int, packed: bool) -> None:
    run_ranks(both, ranks, ranks, overrides | {"model__attention_head_groups": groups}, packed)


def calls(overrides: Overrides) -> list[str]:
    """Return exchanges, waits and kernels of attention in order, on one rank."""
    log: list[str] = []

    def logged(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return function(*args, **kwargs)

        return call

    class Logged(comm.PendingReceive):
        def wait(self) -> Any:
            log.append("wait")
            return super().wait()

    with (
        patch.object(comm, "PendingReceive", Logged),
        patch.object(comm, "exchange", logged("send", comm.exchange)),
        patch.object(ring, "attend", logged("kernel", ring.attend)),
        patch.object(ring, "attend_backward", logged("kernel", ring.attend_backward)),
    ):
        gradients(overrides)
    return log


@pytest.mark.parametrize("overlap", [False, True])
def test_messages_of_a_group_start_before_the_kernel_of_the_last(overlap: bool) -> None:
    """A group's tensors are sent, waited for and computed, and its results too."""
    groups = A2A | MANY | {"model__attention_head_groups": 4, "model__overlap_head_groups": overlap}
    (found, _) = run_ranks(calls, 2, groups)
    compute, alone = ["wait", "kernel", "send"], ["send", "wait", "kernel", "send", "wait"] * 4
    first = ["send", "send", *compute]  # of the second group, and the first is computed
    between = ["send", *compute, "wait"]
    overlapped = [*first, *between, *between, *compute, "wait", "wait"]
    expected = (overlapped if overlap else alone) * 2  # forward and backward
    assert found[-len(expected) :] == expected  # after those of the start


def losses(runs: list[Overrides]) -> list[Losses]:
    return [train_losses(overrides, 2) for overrides in runs]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, A2A | MANY),
        pytest.param(4, CP4 | over("a2a") | MANY | DYNAMIC, marks=pytest.mark.slow),
    ],
)
def test_overlap_changes_no_bit_of_training(ranks: int, overrides: Overrides) -> None:
    """With full recomputation, and in groups that change with the microbatch."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    base = overrides | {f"model__{name}": value for name, value in full.items()} | {"model__attention_head_groups": 2}
    for expected, found in run_ranks(losses, ranks, [base, base | OVERLAP]):
        assert found == expected


def test_memory_falls_with_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside input, gradients and attention's output, a group's share is left."""
    monkeypatch.setattr(groups_of_heads, "GATHERED_TOKENS", 64)
    length, model = 1024, MANY | {"model__kv_channels": 32, "dataset__seq_length": 1024}
    most = {
        n: run_ranks(gradients, 1, model | {"model__attention_head_groups": n}, False, length)[0][1]
        for n in (1, 2, 4, 8)
    }
    fixed = 2 * most[8] - most[4]  # bytes = fixed + shares / groups
    stream = 64 * 8 * length
    # Attention's output is 4 times the input; with its gradient there would be 4 more. Weights and angles are the rest.
    assert (2 + 2 + 4) * stream < fixed < 12.5 * stream
    assert most[2] - fixed == pytest.approx(2 * (most[4] - fixed), rel=0.1)
    assert most[1] - fixed > 6 * (most[8] - fixed)
