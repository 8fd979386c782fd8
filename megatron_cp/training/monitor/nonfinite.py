"""Detect NaN and infinity before the optimizer step, and find the origin.

A step with non-finite numbers runs again on the same microbatches and random numbers, with a hook on every module. The
first event of all ranks in computation order is the origin; later events follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_cp.common.errors import join_limited
from megatron_cp.parallel.collectives import gather_objects, max_over_ranks
from megatron_cp.training.setup import Run

MAX_SKIPPED_IN_A_ROW = 10  # more failures in a row are no coincidence


@dataclass(frozen=True, order=True)
class NonFiniteEvent:
    """The first non-finite number of a rank, ordered as computed over all ranks.

    backward: whether it is a gradient. stage: of the whole pipeline, counted from the end in the backward pass.
    """

    backward: bool
    microbatch: int
    stage: int
    order: int
    rank: int
    where: str

    def __str__(self) -> str:
        return f"rank {self.rank}, microbatch {self.microbatch}: {self.where}"


def gradients_are_finite(run: Run) -> bool:
    """Return whether all ranks' gradients are finite. Collective."""
    buffers = (buffer for chunk in run.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
    return _are_finite(run, (buffer.grad_data for buffer in buffers))


def parameters_are_finite(run: Run) -> bool:
    """Return whether all ranks' parameters are finite. Collective."""
    return _are_finite(run, (parameter.detach() for _, parameter in _named_parameters(run)))


def _are_finite(run: Run, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the tensors of all ranks are finite; one device wait."""
    bad = torch.zeros((), dtype=torch.int32, device=run.device)
    for tensor in tensors:
        if tensor.numel():
            low, high = tensor.aminmax()  # both are nan if any element is
            bad |= ~(torch.isfinite(low) & torch.isfinite(high))
    return not max_over_ranks(bad, run.all_ranks).item()


def origin(run: Run, repeat: Callable[[], float]) -> tuple[str, bool]:
    """Run the step again and locate the first non-finite number. Collective.

    Args:
        repeat: forward and backward on the same microbatches and random numbers; returns the loss.

    Returns:
        A description, and whether the parameters are damaged; equal on every rank.
    """
    bad = [name for name, values in _named_parameters(run) if not bool(torch.isfinite(values.detach()).all())]
    with _watched(run) as seen:
        loss = repeat()
    gathered = gather_objects((min(seen, default=None), bad[:3]), run.all_ranks)
    damaged = [f"{name} on rank {other}" for other, (_, names) in enumerate(gathered) for name in names]
    if damaged:
        return f"the parameters are not finite: {join_limited(damaged, ', ', most=4)}", True
    events = sorted(event for event, _ in gathered if event is not None)
    if events:
        others = [str(event.rank) for event in events[1:9]]
        spread = f" (spread to ranks {', '.join(others)})" if others else ""
        return f"first on {events[0]}{spread}", False
    again = "finite" if math.isfinite(loss) and gradients_are_finite(run) else "not finite, unlike all module outputs"
    return f"a second pass over the same microbatches was {again}", False


@contextmanager
def _watched(run: Run) -> Iterator[list[NonFiniteEvent]]:
    """Record non-finite numbers with hooks on all modules and parameters."""
    seen: list[NonFiniteEvent] = []
    handles: list[Any] = []
    for index, chunk in enumerate(run.model):
        watch = _ChunkWatch(run, index, seen)
        inner = _innermost(chunk)
        handles.append(inner.register_forward_pre_hook(watch.begin))
        for name, module in inner.named_modules():
            handles.append(module.register_forward_hook(partial(watch.module_done, name)))
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_hook(partial(watch.weight, name, parameter)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _ChunkWatch:
    """Records the events of one model chunk of this rank."""

    def __init__(self, run: Run, chunk: int, seen: list[NonFiniteEvent]) -> None:
        self._seen = seen
        self._rank = run.all_ranks.rank()
        self._stage = chunk * run.groups.pp.size() + run.groups.pp.rank()
        self._microbatch = -1
        self._order = 0

    def begin(self, module: nn.Module, inputs: Any) -> None:
        self._microbatch += 1

    def module_done(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        where = f"output of {name or 'the model'} ({type(module).__name__})"
        for tensor in _tensors(outputs):
            self._record(False, self._microbatch, where, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._record, True, self._microbatch, f"gradient of the {where}"))

    def weight(self, name: str, parameter: Any, gradient: torch.Tensor) -> None:
        # If a layer has added the gradient to main_grad itself, the gradient here is an uninitialized placeholder.
        added = getattr(parameter, "grad_added_to_main_grad", False)
        # Right without a pipeline; with a pipeline the module hooks have the right microbatch.
        where = f"gradient of {name}"
        self._record(True, self._microbatch, where, parameter.main_grad if added else gradient)

    def _record(self, backward: bool, microbatch: int, where: str, tensor: torch.Tensor) -> None:
        self._order += 1
        if not bool(torch.isfinite(tensor.detach()).all()):
            stage = -self._stage if backward else self._stage
            kind = "nan" if bool(tensor.detach().isnan().any()) else "inf"
            self._seen.append(
                NonFiniteEvent(backward, microbatch, stage, self._order, self._rank, f"{kind} in the {where}")
            )


def _named_parameters(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in run.model:
        yield from _innermost(chunk).named_parameters()


def _innermost(chunk: Any) -> nn.Module:
    """Return the model without wrappers, whose module names users know."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
