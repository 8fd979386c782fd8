"""Faults to plant inside forked ranks. Each is a context manager that breaks the layout and leaves one rank alone."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rotary_pos_embedding

from megatron_cp.attention import comm
from megatron_cp.attention.sharding import shard_sequence
from megatron_cp.training import batches, setup, step


@contextlib.contextmanager
def skipped_hop() -> Iterator[None]:
    """A ring that keeps what it has: every rank attends to its own keys and values again and again."""

    def hop(pair: Any, distance: int, peers: Any, tag: int) -> Any:
        return comm.Arrival((pair[0].clone(), pair[1].clone()), [])

    with mock.patch.object(comm, "hop", hop):
        yield


@contextlib.contextmanager
def skipped_gradient_hop() -> Iterator[None]:
    """A ring whose forward pass is right and whose key and value gradients stay where they were computed."""
    original = comm.hop

    def hop(pair: Any, distance: int, peers: Any, tag: int) -> Any:
        if tag == comm.GRAD_TAG:
            return comm.Arrival((pair[0].clone(), pair[1].clone()), [])
        return original(pair, distance, peers, tag)

    with mock.patch.object(comm, "hop", hop):
        yield


@contextlib.contextmanager
def skipped_exchange() -> Iterator[None]:
    """Every rank takes for the others' parts what it has itself."""

    def exchange(outgoing: Any, incoming: Any, content: Any, peers: Any, index: int) -> Any:
        for rank, (pieces, places) in enumerate(zip(outgoing, incoming, strict=True)):
            if rank == peers.rank:
                continue
            flat = torch.cat([piece.reshape(-1) for piece in pieces])
            for place, part in zip(places, flat.split([place.numel() for place in places]), strict=True):
                place.copy_(part.view_as(place))
        return comm.Arrival(content, [])

    with mock.patch.object(comm, "exchange", exchange):
        yield


@contextlib.contextmanager
def skipped_all_gather() -> Iterator[None]:
    def all_gather(pieces: Any, outs: Any, content: Any, peers: Any, index: int) -> Any:
        for piece, out in zip(pieces, outs, strict=True):
            out.copy_(torch.cat([piece] * peers.size))
        return comm.Arrival(content, [])

    with mock.patch.object(comm, "all_gather", all_gather):
        yield


@contextlib.contextmanager
def batch_sliced_twice() -> Iterator[None]:
    """By the code that deals batches to ranks, past the mark that a sliced batch carries."""
    original = batches.slice_for_context_parallel

    def twice(batch: Any, cp_rank: int, cp_size: int) -> Any:
        return original(dict(original(batch, cp_rank, cp_size)), cp_rank, cp_size)

    with mock.patch.object(batches, "slice_for_context_parallel", twice):
        yield


@contextlib.contextmanager
def batch_sliced_again_in_the_step() -> Iterator[None]:
    """After every check of batches."""
    original = batches.StaticSteps.__next__

    def again(self: Any) -> Any:
        cp, found = self._run.groups.cp, original(self)
        return replace(
            found,
            microbatches=[
                {key: shard_sequence(value, 1, cp.rank(), cp.size()) for key, value in each.items()}
                for each in found.microbatches
            ],
        )

    with mock.patch.object(batches.StaticSteps, "__next__", again):
        yield


@contextlib.contextmanager
def rope_of_another_group() -> Iterator[None]:
    """RoPE takes its positions from the rank in the tensor-parallel group, of the same size."""
    original = rotary_pos_embedding.get_pos_emb_on_this_cp_rank

    def misplaced(emb: Any, dim: int, group: Any) -> Any:
        tp = dist.new_group([0, 1], use_local_synchronization=True) if dist.get_rank() < 2 else None
        tp = tp or dist.new_group([2, 3], use_local_synchronization=True)
        return original(emb, dim, tp)

    with mock.patch.object(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", misplaced):
        yield


@contextlib.contextmanager
def loss_averaged_per_rank() -> Iterator[None]:
    """Each rank divides by its own number of unmasked tokens, and the ranks' means are averaged."""
    original = step.loss_function

    def mean(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
        total, tokens, _ = original(loss_mask, losses)
        average = total / tokens.clamp(min=1)
        one = torch.ones((), dtype=torch.int)
        return average, one, {"lm loss": torch.stack([average.detach().double(), one.double()])}

    # One rank alone averages over whole samples, which would differ from the right reference just as much.
    def unless_alone(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
        return (mean if loss_mask.shape[1] < _whole_length else original)(loss_mask, losses)

    _whole_length = 32
    with mock.patch.object(step, "loss_function", unless_alone):
        yield


def _wrap_with(change: Callable[[Any], None]) -> Any:
    original = setup.wrap_data_parallel

    def wrap(config: Any, core_config: Any, chunks: Any, groups: Any) -> Any:
        groups = copy.copy(groups)
        change(groups)
        return original(config, core_config, chunks, groups)

    return mock.patch.object(setup, "wrap_data_parallel", wrap)


@contextlib.contextmanager
def gradients_not_reduced_over_cp() -> Iterator[None]:
    def change(groups: Any) -> None:
        groups.dp_cp = groups.intra_dp_cp = groups.dp

    with _wrap_with(change):
        yield


@contextlib.contextmanager
def gradients_scaled() -> Iterator[None]:
    """Every gradient times the context-parallel size, as a loss function that returns too little makes of them."""
    original = step.loss_function

    def scaled(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
        total, tokens, report = original(loss_mask, losses)
        return (total * 4 if loss_mask.shape[1] < 32 else total), tokens, report

    with mock.patch.object(step, "loss_function", scaled):
        yield


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield
