"""Differences between the tensors of two measurements, whole over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.parallel.collectives import gather_objects
from megatron_cp.parallel.device import device
from megatron_cp.verify.shards import whole_tensors

# An element is compared relative to the largest of its tensor; a tensor whose elements are all tiny beside the others'
# (a key bias has no gradient at all) relative to this share of the largest of all.
FLOOR = 1e-3


class WorstDifference(NamedTuple):
    """The tensor that differs most."""

    difference: float
    name: str
    rank: int


class Replicas(NamedTuple):
    """A tensor of which two ranks hold the same part with different values."""

    name: str
    ranks: tuple[int, int]


@dataclass(frozen=True)
class TensorDifferences:
    """How gradients, or changes of weights, differ. Equal on all ranks."""

    worst: WorstDifference | None  # None where nothing was compared
    number: int
    wrong: tuple[str, ...]  # the names of those that differ by more than the tolerance
    ratio: float  # the layout's over the reference's, by least squares
    residual: float  # what this ratio leaves unexplained, relative
    replicas: Replicas | None

    @property
    def difference(self) -> float:
        return self.worst.difference if self.worst is not None else float("inf")


def compare_tensors(reference: list[ShardedTensor], layout: list[ShardedTensor], tolerance: float) -> TensorDifferences:
    """Compare parts of the same tensors, which any ranks may hold. Collective.

    Raises:
        RuntimeFault: on every rank, where the layout has a tensor that the reference lacks.
    """
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
    everyone = gather_objects((errors, sorted(mine), products))
    unknown = sorted({key for _, keys, _ in everyone for key in keys})
    if unknown and layout:
        raise RuntimeFault(f"the reference has no parameter {', '.join(unknown[:4])}", on_all_ranks=True)
    top = max((size for _, size in errors.values()), default=0.0)
    found = [
        WorstDifference(difference / max(size, FLOOR * top, 1e-30), name, rank)
        for rank, (theirs, _, _) in enumerate(everyone)
        for name, (difference, size) in theirs.items()
    ]
    wrong = tuple(sorted({name for difference, name, _ in found if difference > tolerance}))
    dot, square, own = (torch.stack([p for *_, p in everyone]).sum(0) + 1e-300).tolist()
    ratio = dot / square
    residual = max(0.0, own - dot * ratio) ** 0.5 / own**0.5
    return TensorDifferences(max(found, default=None), len(errors), wrong, ratio, residual, _differing_replicas(layout))


def _differing_replicas(parts: list[ShardedTensor]) -> Replicas | None:
    """The first tensor of which two ranks hold the same part with values that are not bit for bit the same."""
    sums = {
        (part.key, str(part.global_slice())): part.data.view(torch.int32).sum(dtype=torch.int64).item()
        for part in parts
    }
    first: dict[Any, tuple[int, int]] = {}
    for rank, theirs in enumerate(gather_objects(sums)):
        for place, checksum in theirs.items():
            before, expected = first.setdefault(place, (rank, checksum))
            if checksum != expected:
                return Replicas(place[0], (before, rank))
    return None
