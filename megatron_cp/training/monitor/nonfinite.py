"""NaN and infinity in the loss or the gradients: seen before the optimizer is, and traced to where they began.

A step whose numbers are not finite is run a second time on the same microbatches and random numbers, with a hook on
every module. What all ranks saw first is compared: the first in the order of computation is the origin, the rest caught
it from there.
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

from megatron_cp.common.errors import shown
from megatron_cp.parallel.collectives import gather_objects, max_over_ranks
from megatron_cp.training.setup import Run

MAX_SKIPPED_IN_A_ROW = 10  # what goes wrong that often does not pass by itself


@dataclass(frozen=True, order=True)
class NonFiniteEvent:
    """Where a number first was not finite. Ordered as the computation is, over all ranks.

    backward: whether it was a gradient. stage: of the whole pipeline, from its end in the backward pass.
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
    """Whether every rank's gradients are; collective, the same answer on every rank."""
    buffers = (buffer for chunk in run.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
    return _are_finite(run, (buffer.grad_data for buffer in buffers))


def parameters_are_finite(run: Run) -> bool:
    """Whether every rank's parameters are; collective, the same answer on every rank."""
    return _are_finite(run, (parameter.detach() for _, parameter in _named_parameters(run)))


def _are_finite(run: Run, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether these of every rank are; the host waits for the device once."""
    bad = torch.zeros((), dtype=torch.int32, device=run.device)
    for tensor in tensors:
        if tensor.numel():
            low, high = tensor.aminmax()  # both are nan if any element is
            bad |= ~(torch.isfinite(low) & torch.isfinite(high))
    return not max_over_ranks(bad, run.all_ranks).item()


def origin(run: Run, repeat: Callable[[], float]) -> tuple[str, bool]:
    """Run the step again and say where it goes wrong; collective, the same answer on every rank.

    Args:
        repeat: forward and backward on the same microbatches and random numbers; returns the loss.

    Returns:
        What to tell a person, and whether the parameters themselves are damaged.
    """
    bad = [name for name, values in _named_parameters(run) if not bool(torch.isfinite(values.detach()).all())]
    with _watched(run) as seen:
        loss = repeat()
    everyone = gather_objects((min(seen, default=None), bad[:3]), run.all_ranks)
    damaged = [f"{name} on rank {other}" for other, (_, names) in enumerate(everyone) for name in names]
    if damaged:
        return f"the parameters are not finite: {shown(damaged, ', ', most=4)}", True
    sightings = sorted(sighting for sighting, _ in everyone if sighting is not None)
    if sightings:
        others = [str(sighting.rank) for sighting in sightings[1:9]]
        spread = f" (spread to ranks {', '.join(others)})" if others else ""
        return f"first on {sightings[0]}{spread}", False
    again = (
        "finite"
        if math.isfinite(loss) and gradients_are_finite(run)
        else "not finite, but every module output was finite"
    )
    return f"a second pass over the same microbatches was {again}", False


@contextmanager
def _watched(run: Run) -> Iterator[list[NonFiniteEvent]]:
    """Hooks on all modules and parameters that note the first numbers which are not finite, forward and backward."""
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
    """Notes for one model chunk of this rank."""

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
            self._note(False, self._microbatch, where, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, True, self._microbatch, f"gradient of the {where}"))

    def weight(self, name: str, parameter: Any, gradient: torch.Tensor) -> None:
        # Where a layer has added it to the sum itself, what comes is a placeholder, whose memory nobody has written.
        added = getattr(parameter, "grad_added_to_main_grad", False)
        # One microbatch's gradients follow its own forward pass, but for pipelines: there a module's hook knows better.
        where = f"gradient of {name}"
        self._note(True, self._microbatch, where, parameter.main_grad if added else gradient)

    def _note(self, backward: bool, microbatch: int, where: str, tensor: torch.Tensor) -> None:
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
    """The model below its wrappers, whose names a person knows."""
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
