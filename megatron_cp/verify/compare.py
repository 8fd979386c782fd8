"""Compare a layout with one rank, or with another layout, on the same weights and tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_cp.config import RunConfig
from megatron_cp.errors import RuntimeFault
from megatron_cp.parallel.agree import everyones
from megatron_cp.parallel.device import device
from megatron_cp.parallel.process_groups import build_lone_groups
from megatron_cp.training.step import StepResult
from megatron_cp.verify.measure import Measurement, measure
from megatron_cp.verify.shards import whole_tensors

# What rounding in float32 explains, relative to the reference: sums taken in another order differ by about 1e-7 in the
# loss and 1e-6 in the norm. A gradient's elements cancel; they are relative to the largest one of their parameter.
LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-5, 1e-4
# A parameter whose gradients are all tiny beside the others' (a key bias has none at all) is measured against this
# share of the largest gradient of the model.
GRADIENT_FLOOR = 1e-3


class Worst(NamedTuple):
    """The parameter whose gradient differs most."""

    difference: float
    name: str
    rank: int


@dataclass(frozen=True)
class Comparison:
    """What was found. Equal on all ranks."""

    reference: list[StepResult]
    layout: list[StepResult]
    worst: Worst | None
    num_parameters: int
    num_wrong: int
    ratio: float  # gradients of the layout over those of the reference, by least squares
    residual: float  # what this ratio leaves unexplained, relative
    replicas: str | None  # a parameter whose copies on several ranks have different gradients, and which ranks
    probe: str | None
    fault: str | None  # why the layout did not run at all
    seconds: tuple[float, float]

    @property
    def loss_difference(self) -> float:
        return _largest([(a.loss, b.loss) for a, b in zip(self.reference, self.layout, strict=True)])

    @property
    def norm_difference(self) -> float:
        pairs = zip(self.reference, self.layout, strict=True)
        return _largest([(a.grad_norm or 0.0, b.grad_norm or 0.0) for a, b in pairs])

    @property
    def equal(self) -> bool:
        """Whether the layout trains the same model, up to rounding."""
        return (
            self.fault is None
            and self.probe is None
            and self.replicas is None
            and self.worst is not None
            and self.loss_difference <= LOSS_TOLERANCE
            and self.norm_difference <= NORM_TOLERANCE
            and self.worst.difference <= GRADIENT_TOLERANCE
            and [step.tokens for step in self.reference] == [step.tokens for step in self.layout]
        )


def _largest(pairs: list[tuple[float, float]]) -> float:
    """The largest difference, relative to the first of each pair; infinite where something is not a number."""
    differences = [abs(a - b) / max(abs(a), 1e-30) for a, b in pairs]
    return max((d if d == d else float("inf") for d in differences), default=float("inf"))


def compare_with_one_rank(layout: RunConfig, reference: RunConfig) -> Comparison:
    """Run ``reference``, a configuration for one rank, then ``layout`` on all. Collective.

    Every rank runs the reference, each by itself, because megatron-core's optimizer is built by all ranks of the world
    together; rank 0's is the one that counts.

    Raises:
        RuntimeFault: the layout failed on this rank alone.
    """
    started = time.monotonic()
    measurement = measure(reference, build_lone_groups(reference.dist.distributed_timeout_minutes))
    steps: list[Any] = [measurement.steps]
    dist.broadcast_object_list(steps, src=0, device=device())
    measurement.steps = steps[0]
    if dist.get_rank() != 0:
        measurement.weights, measurement.gradients = [], []
    return _compare(measurement, layout, time.monotonic() - started)


def compare_layouts(first: RunConfig, second: RunConfig) -> Comparison:
    """Run two layouts of one model, one after the other, on all ranks. Collective."""
    started = time.monotonic()
    return _compare(measure(first), second, time.monotonic() - started)


def _compare(reference: Measurement, layout: RunConfig, seconds: float) -> Comparison:
    started = time.monotonic()
    result, fault = Measurement(), None
    try:
        result = measure(layout, weights=reference.weights)
    except RuntimeFault as error:
        if not error.on_all_ranks:
            raise
        fault = str(error)
    gradients = _compare_gradients(reference.gradients, result.gradients)
    return Comparison(
        reference.steps,
        result.steps if fault is None else [replace(step, loss=float("nan")) for step in reference.steps],
        *gradients,
        replicas=_differing_replicas(result.gradients),
        probe=reference.probe or result.probe,
        fault=fault,
        seconds=(seconds, time.monotonic() - started),
    )


def _compare_gradients(
    reference: list[ShardedTensor], layout: list[ShardedTensor]
) -> tuple[Worst | None, int, int, float, float]:
    """The worst parameter over all ranks, numbers of parameters and of wrong ones, ratio and residual."""
    mine: dict[str, list[ShardedTensor]] = {}
    for part in layout:
        mine.setdefault(part.key, []).append(part)
    errors: dict[str, tuple[float, float]] = {}  # name -> largest absolute difference here, largest reference value
    products = torch.zeros(3, dtype=torch.float64)  # layout * reference, reference * reference, layout * layout
    for key, whole in whole_tensors(reference, device()):
        largest = 0.0
        for part in mine.pop(key, []):
            values, expected = part.data.double(), whole[part.global_slice()].cpu().double()
            difference = (values - expected).abs().max().item() if values.numel() else 0.0
            largest = max(largest, difference if difference == difference else float("inf"))
            products += torch.stack([(values * expected).sum(), (expected * expected).sum(), (values * values).sum()])
        errors[key] = (largest, whole.abs().max().item())
    everyone = everyones((errors, sorted(mine), products))
    unknown = sorted({key for _, keys, _ in everyone for key in keys})
    if unknown and layout:
        raise RuntimeFault(f"the reference has no parameter {', '.join(unknown[:4])}", on_all_ranks=True)
    top = max((size for _, size in errors.values()), default=0.0)
    found = [
        Worst(difference / max(size, GRADIENT_FLOOR * top, 1e-30), name, rank)
        for rank, (theirs, _, _) in enumerate(everyone)
        for name, (difference, size) in theirs.items()
    ]
    wrong = {name for difference, name, _ in found if difference > GRADIENT_TOLERANCE}
    dot, square, own = (torch.stack([p for *_, p in everyone]).sum(0) + 1e-300).tolist()
    ratio = dot / square
    residual = max(0.0, own - dot * ratio) ** 0.5 / own**0.5
    return max(found, default=None), len(errors), len(wrong), ratio, residual


def _differing_replicas(gradients: list[ShardedTensor]) -> str | None:
    """The first parameter of which two ranks hold the same part with gradients that are not bit for bit the same."""
    sums = {
        (part.key, str(part.global_slice())): part.data.view(torch.int32).sum(dtype=torch.int64).item()
        for part in gradients
    }
    first: dict[Any, tuple[int, int]] = {}
    for rank, theirs in enumerate(everyones(sums)):
        for place, checksum in theirs.items():
            before, expected = first.setdefault(place, (rank, checksum))
            if checksum != expected:
                return f"{place[0]} on ranks {before} and {rank}"
    return None
