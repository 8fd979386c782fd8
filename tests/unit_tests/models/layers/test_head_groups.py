"""Attention by groups of heads has the gradients of all heads at once.

The memory of a group is tested too.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.models.layers import head_groups
from megatron_cp.models.layers.head_groups import HeadGroupsAttention
from megatron_cp.parallel.collectives import sum_over_ranks
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2, HCP, SP, TP2, over

Overrides = dict[str, Any]
SINKS = {"model__softmax_type": "learnable", "model__window_size": [9, 0]}
NORMS = {"model__qk_layernorm": True, "model__add_qkv_bias": True}
MANY = {"model__num_query_groups": 8}


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


def gradients(overrides: Overrides, packed: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    """Return output and gradients of attention in float64, and the peak bytes."""
    run, _ = start(tiny_config(model__num_layers=2, **overrides))
    model = run.model[0].module
    attention = model.decoder.layers[1].self_attention.double()
    assert isinstance(attention, HeadGroupsAttention) == (overrides.get("model__attention_head_groups", 1) > 1)
    layout = run.config.model
    rows = 2 * (192 if packed else 128) // layout.context_parallel_size
    shard = rows // (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    hidden = torch.randn(shard, 1, layout.hidden_size, generator=generator, dtype=torch.float64).requires_grad_()
    packs = None
    if packed:
        bounds, padded = torch.tensor([0, 61, 250, 377]), torch.tensor([0, 64, 256, 384])
        packs = PackedSeqParams("thd", bounds, bounds, padded, padded, 192, 192)
    angles = model.rotary_pos_emb(rows * layout.context_parallel_size, packed_seq=packed)
    # Gradients of a data-parallel wrapper's weights are added where it keeps them: these are asked for instead.
    names, parameters = zip(*attention.named_parameters(), strict=True)
    with Live() as live:
        out, _ = attention(hidden, None, rotary_pos_emb=angles, packed_seq_params=packs)
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
        (1, NORMS, 2, True),
        (4, TP2 | SP | CP2 | NORMS | SINKS, 2, False),
        pytest.param(4, TP2 | CP2 | over("a2a") | MANY, 2, True, marks=pytest.mark.slow),
        (4, HCP | {"model__context_parallel_size": 4} | SINKS, 4, True),
        pytest.param(2, CP2 | over("all_gather") | NORMS, 4, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_those_of_all_heads_at_once(
    ranks: int, overrides: Overrides, groups: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_groups, "GATHERED_TOKENS", 24)  # divides nothing
    whole = run_ranks(gradients, ranks, overrides, packed)
    by_groups = run_ranks(gradients, ranks, overrides | {"model__attention_head_groups": groups}, packed)
    for (expected, _), (found, _) in zip(whole, by_groups, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # Only sums over groups are in another order.
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def test_memory_falls_with_the_groups() -> None:
    """Beside output and input with their gradients, a group's share is left."""
    model = MANY | {"model__kv_channels": 32, "dataset__seq_length": 512}  # queries are 4 times the input
    most = {n: run_ranks(gradients, 1, model | {"model__attention_head_groups": n})[0][1] for n in (1, 2, 4, 8)}
    fixed = 2 * most[8] - most[4]  # bytes = fixed + shares / groups
    assert most[2] - fixed == pytest.approx(2 * (most[4] - fixed), rel=0.1)
    assert most[1] - fixed > 6 * (most[8] - fixed)
