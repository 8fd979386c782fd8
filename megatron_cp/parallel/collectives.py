"""What every rank says, on every rank: the one exchange of Python objects with which ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

# Not as dist.is_initialized, which data/samples/datasets.py hides from megatron-core while other ranks wait.
from torch.distributed import is_initialized


def everyones[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Each rank's ``value``, in the order of ``group`` (None: all ranks); collective, and alone without one."""
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def found_by_anyone(problems: Sequence[str], group: dist.ProcessGroup | None = None) -> list[str]:
    """``rank 3: its problem`` for the problems of every rank, the same on all of them; collective.

    A rank that raises alone leaves the others in their next collective: with this, all raise or none.
    """
    return [
        f"rank {rank}: {problem}" for rank, theirs in enumerate(everyones(list(problems), group)) for problem in theirs
    ]
