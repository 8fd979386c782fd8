"""On CPUs a step copies no whole gradients or parameters without need.

Its numbers keep the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers, mappings
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config

SHARDS = tuple(
    (module, name)
    for module in (param_and_grad_buffer, mappings, layers)
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func")
)
PLACES = (
    *SHARDS,
    (clip_grads, "multi_tensor_scale_impl"),
    (DistributedOptimizer, "_copy_main_params_to_model_params"),
)
COPIES = ("copy_.default", "mul.Tensor")
EXCHANGES = ("reduce_scatter_tensor_coalesced_.default", "allgather_into_tensor_coalesced_.default")


class WholeCopies(TorchDispatchMode):
    """Count operations that copy a flat tensor or hand it to gloo.

    Tensors of at least a thousand elements count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"{func.overloadpacket.__name__}.{func._overloadname}"
        flat = args and isinstance(args[0], torch.Tensor) and args[0].dim() == 1 and args[0].numel() >= 1000
        if name in EXCHANGES or (name in COPIES and flat):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def train(overrides: dict[str, Any], upstream: bool) -> tuple[list[torch.Tensor], list[str]]:
    """Return all parameters after three steps, and the copies of the third step.

    With upstream's own functions or ours.
    """
    kept = [getattr(owner, name) for owner, name in PLACES]
    for (owner, name), function in zip(PLACES, kept, strict=True):
        setattr(owner, name, function.__wrapped__ if upstream else function)
    try:
        run, batches = start(tiny_config(**overrides))
        for _ in range(2):
            train_step(run, next(batches).microbatches)
        microbatches = next(batches).microbatches
        with WholeCopies() as copies:
            train_step(run, microbatches)
        parameters = [each.detach().clone() for chunk in run.model for each in chunk.parameters()]
        run.close()
    finally:
        for (owner, name), function in zip(PLACES, kept, strict=True):
            setattr(owner, name, function)
    return parameters, copies.names


def both(overrides: dict[str, Any]) -> tuple[bool, list[str], list[str]]:
    """Return whether both end with the same bits, and upstream's copies and ours."""
    (theirs, before), (ours, after) = train(overrides, upstream=True), train(overrides, upstream=False)
    return all(map(torch.equal, theirs, ours)), before, after


LOWER = {"optimizer__clip_grad": 0.01, "dist__use_decentralized_pg": True}


def test_one_rank_copies_nothing() -> None:
    [(same, before, after)] = run_ranks(both, 1, LOWER)
    assert same
    assert set(before) == {*COPIES, *EXCHANGES}
    assert after == []


@pytest.mark.parametrize(
    "overrides", [{}, {"mixed_precision__fp32": False, "mixed_precision__bf16": True}], ids=["float32", "bf16"]
)
def test_several_ranks_exchange_shards_where_they_lie(overrides: dict[str, Any]) -> None:
    for same, before, after in run_ranks(both, 2, LOWER | overrides):
        assert same
        assert set(before) >= set(EXCHANGES)
        assert set(after).isdisjoint(EXCHANGES)


def test_overlap_leaves_exchanges_to_gloo() -> None:
    overlap = {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True}
    for same, before, after in run_ranks(both, 2, LOWER | overlap):
        assert same
        exchanged = [name for name in before if name in EXCHANGES]
        assert exchanged == [name for name in after if name in EXCHANGES] != []


def test_overlap_exchanges_nothing_for_the_only_replica_of_an_expert() -> None:
    experts = {"model__num_moe_experts": 4, "model__moe_ffn_hidden_size": 32, "model__expert_model_parallel_size": 2}
    overlap = {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True}
    for same, before, after in run_ranks(both, 2, LOWER | overlap | experts):
        assert same
        for name in EXCHANGES:
            assert 0 < after.count(name) < before.count(name)
