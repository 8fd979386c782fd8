"""Replay the messages of a training step in NCCL's order.

See :mod:`tests.doubles.pretend_gpu.messages`. ``tests/unit_tests/doubles/test_pretend_gpu.py`` runs this file in a
process with a pretended GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cp.training.step import train_step
from tests.doubles.pretend_gpu.messages import Message, carry, ledger
from tests.doubles.pretend_gpu.steps import BF16, DENSE, PACKED, some
from tests.packed_runs import DYNAMIC, LONGEST, lengths_file, packed_losses
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.training.layouts.cases import LAYOUTS, PP2, SP, TP2, VPP2

Events = list[Message | int]


def sent(overrides: dict[str, Any]) -> Events:
    """Return the messages of this rank in two steps."""
    run, batches = start(tiny_config(**overrides))
    ledger.clear()
    for _ in range(2):
        train_step(run, next(batches).microbatches)
    assert not ledger.under_way, "nobody waited for them"
    events = list(ledger.events)
    run.close()
    return events


def sent_of_packs(lengths: str, overrides: dict[str, Any]) -> Events:
    ledger.clear()
    packed_losses(lengths, overrides, steps=4)
    assert not ledger.under_way, "nobody waited for them"
    return list(ledger.events)


def check(ranks: list[Events]) -> None:
    most = max(sum(isinstance(event, Message) for event in events) for events in ranks)
    assert carry(ranks) == carry(ranks, one_stream=True) >= most > 30


FURTHER = "hybrid, two tokens further"
QUICK = {"cp4 a layer each", "pp2 vpp2 cp2", "experts, spread", FURTHER, f"dynamic {FURTHER}"}
QUICK |= {"dynamic, gathered", "dynamic, pp2 vpp2", "pp3 vpp2", "overlapped"}


def quick(names: Iterable[str]) -> list[Any]:
    return some(names, set(names) - QUICK)


@pytest.mark.parametrize("name", quick(LAYOUTS))
def test_nccl_carries_every_layout(name: str) -> None:
    ranks, overrides = LAYOUTS[name]
    check(run_ranks(sent, ranks, BF16 | overrides))


@pytest.mark.slow
def test_nccl_carries_gradients_between_messages() -> None:
    overlapped = {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True, "train__global_batch_size": 8}
    check(run_ranks(sent, 4, BF16 | PP2 | VPP2 | overlapped))


@pytest.mark.parametrize(
    "name", quick(["pp2", "experts, spread", "latent", FURTHER, "multi-token prediction", "overlapped"])
)
def test_nccl_carries_every_model(name: str) -> None:
    ranks, overrides, _ = DENSE[name]
    check(run_ranks(sent, ranks, BF16 | overrides))


@pytest.mark.parametrize("name", quick(PACKED))
def test_nccl_carries_packs(name: str, tmp_path: Path) -> None:
    ranks, overrides, _ = PACKED[name]
    check(run_ranks(sent_of_packs, ranks, lengths_file(tmp_path), BF16 | overrides))


def pp(stages: int, virtual: int, **more: Any) -> dict[str, Any]:
    """Return settings for packs through virtual stages of one or two layers."""
    return DYNAMIC | {
        "model__pipeline_model_parallel_size": stages,
        "model__virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "model__num_layers": max(4, stages * virtual),
        "model__max_seqlen_per_dp_cp_rank": LONGEST,
        **more,
    }


PIPELINES = {
    "pp4": (4, pp(4, 1)),
    "pp3 vpp2": (3, pp(3, 2)),
    "pp2 vpp3, tp2 sp": (4, pp(2, 3, **TP2, **SP)),
    "pp4 vpp3": (4, pp(4, 3)),
    "pp2 vpp2, groups of four": (2, pp(2, 2, model__microbatch_group_size_per_vp_stage=4)),
}


@pytest.mark.parametrize("name", quick(PIPELINES))
def test_nccl_carries_packs_through_virtual_stages(name: str, tmp_path: Path) -> None:
    ranks, overrides = PIPELINES[name]
    events = run_ranks(sent_of_packs, ranks, lengths_file(tmp_path), BF16 | overrides)
    lengths = {x.what for each in events for x in each if isinstance(x, Message) and x.peer is not None}
    assert len(lengths) > 5, "lengths that do not differ prove little"
    check(events)


def pair(number: int, size: int = 3) -> torch.Tensor:
    return torch.full((size,), float(number), device="cuda")


def by_tag() -> Events:
    """Receive in another order than sent: gloo matches by tag."""
    other, works = 1 - dist.get_rank(), []
    first, second = pair(0), pair(0)
    operations = [(dist.isend, pair(1), 1), (dist.isend, pair(2), 2), (dist.irecv, second, 2), (dist.irecv, first, 1)]
    works = dist.batch_isend_irecv([dist.P2POp(op, x, group_peer=other, tag=tag) for op, x, tag in operations])
    for work in works:
        work.wait()
    assert (first.tolist(), second.tolist()) == ([1.0] * 3, [2.0] * 3)
    return list(ledger.events)


def both_send_first() -> Events:
    """Send before receiving on both ranks: gloo's receives wait for no earlier send."""
    other, received = 1 - dist.get_rank(), pair(0)
    for work in (dist.isend(pair(1), other), dist.irecv(received, other)):
        work.wait()
    return list(ledger.events)


def in_another_order() -> Events:
    """Order messages and collectives differently on two ranks.

    gloo's messages wait for no collective.
    """
    rank, x = dist.get_rank(), pair(1)
    work = None if rank else dist.all_reduce(pair(1), async_op=True)
    send = [dist.P2POp(dist.irecv if rank else dist.isend, x, group_peer=1 - rank)]
    for each in dist.batch_isend_irecv(send):
        each.wait()
    if work is None:
        dist.all_reduce(pair(1))
    else:
        work.wait()
    return list(ledger.events)


@pytest.mark.parametrize(
    ("send", "message"),
    [(by_tag, "which is taken for"), (both_send_first, "for ever"), (in_another_order, "for ever")],
)
def test_orders_that_deadlock_nccl_raise(send: Callable, message: str) -> None:
    events = run_ranks(send, 2)
    with pytest.raises(AssertionError, match=message):
        carry(events)


@contextmanager
def under_way() -> Any:
    """Yield a tensor that is being received, and one that is being sent."""
    other, received, sent = 1 - dist.get_rank(), pair(0, 8), pair(1, 4)
    works = [dist.isend(sent, other), dist.irecv(received[2:6], other)]
    yield received, sent
    for work in works:
        work.wait()
    assert received.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def reads() -> None:
    with under_way() as (received, _):
        received.sum()


def overwrites() -> None:
    with under_way() as (_, sent):
        sent.zero_()


def gives_away() -> None:
    """Release memory as a pipeline frees what it has sent: within the tensor.

    A work alone holds the tensor.
    """
    with under_way() as (_, sent):
        sent.data = pair(0, 1)


def looks_elsewhere() -> None:
    with under_way() as (received, sent):
        received[:2].sum()
        received[6:].zero_()
        sent.sum()


@contextmanager
def gathering() -> Any:
    """Gather as megatron-core gathers its parameters, in one coalesced call."""
    whole = [pair(0, 4), pair(0, 2)]
    with dist._coalescing_manager(async_ops=True) as handle:
        for each in whole:
            dist.all_gather_into_tensor(each, each.chunk(2)[dist.get_rank()], async_op=True)
    yield whole[1]
    handle.wait()
    whole[1].zero_()


def reads_what_is_gathered() -> None:
    with gathering() as received:
        received.sum()


def test_accesses_to_buffers_in_use_raise() -> None:
    run_ranks(looks_elsewhere, 2)
    with pytest.raises(RanksFailed, match=r"TooEarly: sum reads \(8,\), which is being received into"):
        run_ranks(reads, 2)
    with pytest.raises(RanksFailed, match=r"TooEarly: sum reads \(2,\), which is being received into"):
        run_ranks(reads_what_is_gathered, 2)
    with pytest.raises(RanksFailed, match=r"TooEarly: zero_ writes \(4,\), which is being sent"):
        run_ranks(overwrites, 2)
    with pytest.raises(RanksFailed, match="memory of a tensor that was being sent was given away"):
        run_ranks(gives_away, 2)
