"""Compare tensors of two measurements, as whole tensors over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.parallel.collectives import gather_objects
from megatron_cp.parallel.device import device
from megatron_cp.verify.shards import whole_tensors

# Elements are compared relative to the largest of the tensor. Tiny tensors (a key bias has no gradient) are compared
# relative to this share of the largest of all tensors. The optimizer divides by magnitudes: it enlarges their rounding.
FLOOR, UPDATE_FLOOR = 1e-3, 1e-2


class WorstDifference(NamedTuple):
    """The tensor with the largest difference."""

    difference: float
    name: str
    rank: int


class Replicas(NamedTuple):
    """A tensor whose replicas differ between two ranks."""

    name: str
    ranks: tuple[int, int]


@dataclass(frozen=True)
class TensorDifferences:
    """Differences of gradients or weight updates; equal on all ranks."""

    worst: WorstDifference | None  # None if nothing was compared
    number: int
    wrong: tuple[str, ...]  # tensors beyond the tolerance
    ratio: float  # layout / reference, by least squares
    residual: float  # residual of this ratio, relative
    replicas: Replicas | None

    @property
    def difference(self) -> float:
        return self.worst.difference if self.worst is not None else float("inf")


def compare_tensors(
    reference: list[ShardedTensor],
    layout: list[ShardedTensor],
    tolerance: float,
    floor: float = FLOOR,
    least: float = 0.0,
) -> TensorDifferences:
    """Compare shards of the same tensors, held by any ranks. Collective.

    Args:
        floor: share of the largest tensor's largest element that smaller tensors are compared with.
        least: value that smaller tensors are compared with, too.

    Raises:
        RuntimeFault: on every rank, if the layout has a tensor that the reference lacks.
    """
    shards: dict[str, list[ShardedTensor]] = {}
    for part in layout:
        shards.setdefault(part.key, []).append(part)
    errors: dict[str, tuple[float, float]] = {}  # name -> largest absolute difference here, largest reference value
    products = torch.zeros(3, dtype=torch.float64)  # layout * reference, reference * reference, layout * layout
    for key, whole in whole_tensors(reference, device()):
        largest = 0.0
        for part in shards.pop(key, []):
            values, expected = part.data.double(), whole[part.global_slice()].cpu().double()
            difference = (values - expected).abs().max().item() if values.numel() else 0.0
            largest = max(largest, difference if difference == difference else float("inf"))
            products += torch.stack([(values * expected).sum(), (expected * expected).sum(), (values * values).sum()])
        errors[key] = (largest, whole.abs().max().item())
    gathered = gather_objects((errors, sorted(shards), products))
    unknown = sorted({key for _, keys, _ in gathered for key in keys})
    if unknown and layout:
        raise RuntimeFault(f"the reference has no parameter {', '.join(unknown[:4])}", on_all_ranks=True)
    top = max((size for _, size in errors.values()), default=0.0)
    found = [
        WorstDifference(difference / max(size, floor * top, least, 1e-30), name, rank)
        for rank, (sent, _, _) in enumerate(gathered)
        for name, (difference, size) in sent.items()
    ]
    wrong = tuple(sorted({name for difference, name, _ in found if difference > tolerance}))
    dot, square, own = (torch.stack([p for *_, p in gathered]).sum(0) + 1e-300).tolist()
    ratio = dot / square
    residual = max(0.0, own - dot * ratio) ** 0.5 / own**0.5
    return TensorDifferences(max(found, default=None), len(errors), wrong, ratio, residual, _differing_replicas(layout))


def _differing_replicas(parts: list[ShardedTensor]) -> Replicas | None:
    """Return the first tensor whose replicas are not bitwise equal."""
    sums = {
        (part.key, str(part.global_slice())): part.data.view(torch.int32).sum(dtype=torch.int64).item()
        for part in parts
    }
    first: dict[Any, tuple[int, int]] = {}
    for rank, sent in enumerate(gather_objects(sums)):
        for place, checksum in sent.items():
            before, expected = first.setdefault(place, (rank, checksum))
            if checksum != expected:
                return Replicas(place[0], (before, rank))
    return None
