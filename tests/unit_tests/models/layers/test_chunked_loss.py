"""Chunked cross-entropy: the same numbers and less memory.

Each parameter gets one gradient per microbatch.
"""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cp.models.layers.chunked_loss import chunked_losses
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, PP2, SP, TP2, VPP2

CHUNK = {"model__cross_entropy_chunk_size": 5}  # divides nothing
TIED = {"model__share_embeddings_and_output_weights": True}
MTP2 = {"model__mtp_num_layers": 2, "model__mtp_loss_scaling_factor": 0.5}
HYBRID = {
    "model__architecture": "hybrid",
    "model__hybrid_layer_pattern": "M*-M",
    "model__mamba_head_dim": 16,
    "model__mamba_num_groups": 4,
    "model__mamba_state_dim": 16,
}
BF16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
STEPS = 3


def head(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Build an output layer on one rank."""
    logits = (hidden @ weight.t()).float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
    return losses.view(hidden.shape[:2]).t().contiguous()


def gradients(size: int, dtype: torch.dtype = torch.float32, positions: int = 33) -> tuple[torch.Tensor, ...]:
    """Return losses and gradients from the same bf16 inputs, computed in ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, 2, 16, generator=generator).bfloat16().to(dtype).requires_grad_()
    weight = (torch.randn(50, 16, generator=generator) / 4).bfloat16().to(dtype).requires_grad_()
    labels = torch.randint(50, (2, positions), generator=generator)
    losses = chunked_losses(head, hidden, weight, labels, size)
    (losses * torch.rand(2, positions, generator=generator)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return losses.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("size", [1, 2, 10, 64])
def test_losses_and_gradients_equal_those_of_the_whole(size: int) -> None:
    for whole, pieces in zip(gradients(66), gradients(size), strict=True):
        assert (whole - pieces).abs().max() <= 1e-6 * whole.abs().max()


def test_a_second_derivative_raises() -> None:
    hidden, weight = torch.randn(6, 1, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = chunked_losses(head, hidden, weight, torch.zeros(1, 6, dtype=torch.int64), 2).sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.grad(loss + gradient.square().sum(), hidden)


def test_a_pieces_gradient_of_the_weight_is_free_before_the_next() -> None:
    """It is as large as the output layer; the first one is the sum."""
    found: list[StorageWeakRef] = []
    held: list[int] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(hidden, weight)
            return (hidden @ weight.t()).sum(-1).t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            hidden, weight = ctx.saved_tensors
            held.append(sum(not each.expired() for each in found))
            of_weight = torch.ones_like(weight)
            found.append(StorageWeakRef(of_weight.untyped_storage()))
            return torch.ones_like(hidden), of_weight

    hidden, weight = torch.ones(8, 1, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    losses = chunked_losses(lambda *given: Product.apply(*given[:2]), hidden, weight, torch.zeros(1, 8), 2)
    losses.sum().backward()
    assert held == [0, 1, 1, 1]
    assert torch.equal(weight.grad, torch.full_like(weight, 4.0))


def test_the_weights_gradient_is_summed_in_float32() -> None:
    """A sum in bf16 over 500 pieces would lose values below its last bit."""
    exact = gradients(1000, positions=500)[2]

    def error(size: int) -> float:
        return float((gradients(size, torch.bfloat16, positions=500)[2].float() - exact).norm() / exact.norm())

    assert error(2) < 1.5 * error(1000) < 0.02


# The memory.


class Peak(TorchDispatchMode):
    """Bytes of tensors that are alive at once, at most, and of the largest.

    Tensors made inside the context count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_of_a_step(length: int, overrides: dict[str, Any]) -> tuple[int, int]:
    """Return bytes alive at once and of the largest tensor during a step.

    The training step has sequences of this length.
    """
    config = tiny_config(
        dataset__seq_length=length,
        tokenizer__vocab_size=8191,  # the logits of a token are larger than all its activations
        model__num_layers=1,
        train__global_batch_size=1,
        **overrides,
    )
    run, batches = start(config)
    train_step(run, next(batches).microbatches)  # permanent tensors exist from here on
    with Peak() as memory:
        train_step(run, next(batches).microbatches)
    run.close()
    return memory.peak, memory.largest


@pytest.mark.parametrize("model", [{}, MTP2], ids=["main loss", "two depths"])
def test_memory_does_not_grow_with_the_logits(model: dict[str, Any]) -> None:
    """A longer sequence may cost its hidden states alone.

    A token's logits are 32 KiB, and pieces have 64 tokens.
    """
    logits = 4 * 8192
    heads = 1 + model.get("model__mtp_num_layers", 0)
    small, large = 256, 1024
    for overrides, low, high in (({}, 1.0, 99.0), ({"model__cross_entropy_chunk_size": 64}, 0.0, 0.5)):
        (peak, _), (more, largest) = (
            run_ranks(peak_of_a_step, 1, length, model | overrides)[0] for length in (small, large)
        )
        grown = (more - peak) / (large - small) / logits / heads  # in logits a token and head
        assert low < grown < high, (overrides, grown)
        if overrides:
            assert largest < large * logits / 2


# Training.


def losses_of(overrides: dict[str, Any]) -> tuple[list[tuple[float, ...]], list[int]]:
    """Return each step's (loss, gradient norm, depths' losses), and a set of counts.

    The counts say how often a parameter's gradient became ready in a microbatch.
    """
    run, batches = start(tiny_config(**overrides))
    ready: Counter[int] = Counter()
    for parameter in (parameter for chunk in run.model for parameter in chunk.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda each: ready.update([id(each)]))
    steps = [next(batches).microbatches for _ in range(STEPS)]
    results = [train_step(run, microbatches) for microbatches in steps]
    run.close()
    times = sorted({number / sum(map(len, steps)) for number in ready.values()})
    return [(result.loss, result.grad_norm or 0.0, *result.mtp_losses) for result in results], times


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, tied, mtp": (1, TIED | MTP2),
    "tp2 sp cp2, mtp": (4, TP2 | SP | CP2 | MTP2),
    "tp2 cp2": (4, TP2 | CP2),
    "tp2 sp, tied": (2, TP2 | SP | TIED),
    "cp4 a2a+p2p": (4, CP4 | HCP),
    "pp2 vpp2 cp2, mtp, tied": (4, PP2 | VPP2 | CP2 | MTP2 | TIED),
    "tp2 sp, larger microbatches": (2, TP2 | SP | {"train__micro_batch_size": 2}),
    "hybrid, pp2 tp2 sp": (4, HYBRID | PP2 | TP2 | SP),
    "dp2 cp2, overlapped": (
        4,
        CP2 | MTP2 | TIED | {"ddp__overlap_grad_reduce": True, "ddp__bucket_size": 20000},
    ),
}
FAST = ("one rank, tied, mtp", "tp2 sp, tied")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES])
def test_training_in_pieces_equals_training_without(name: str) -> None:
    world_size, overrides = CASES[name]
    plain = run_ranks(losses_of, world_size, overrides)[0]
    pieces = run_ranks(losses_of, world_size, overrides | CHUNK)[0]
    a, b = (torch.tensor(each[0], dtype=torch.float64) for each in (plain, pieces))
    assert ((a - b) / a).abs().max() < 1e-6
    assert plain[1] == pieces[1] == [1.0], "a gradient is ready once a microbatch"


def test_bf16_in_pieces_stays_close() -> None:
    plain = run_ranks(losses_of, 2, CP2 | BF16)[0][0]
    pieces = run_ranks(losses_of, 2, CP2 | BF16 | CHUNK)[0][0]
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (plain, pieces))
    assert ((a - b) / a).abs().max() < 2e-3
