"""Verify a checkpoint's files on all ranks, and find a complete one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.common.limits import in_one_line
from megatron_cp.parallel.collectives import gather_objects
from megatron_cp.training.checkpoint.checksums import changed_files, read_checksums
from megatron_cp.training.checkpoint.content import read_common
from megatron_cp.training.checkpoint.files import damage, existing_folder, saved_iterations
from megatron_cp.training.monitor.metrics import logger


def verified_common(folder: Path, iteration: int, verify: bool, fix_for: Callable[[str, int], str]) -> dict[str, Any]:
    """Verify a checkpoint's checksums and return the non-tensor state. Collective.

    Args:
        fix_for: formats the settings to type for another iteration of a folder.

    Raises:
        RuntimeFault: on every rank, if any rank finds damage. Names another complete checkpoint.
    """
    problems = problems_of(folder, verify)
    if problems:
        found = f"checkpoint {folder} cannot be read: {'; '.join(problems[:4])}"
        root, other = folder.parent, find_complete(folder.parent, iteration, verify)
        if other is None:
            raise RuntimeFault(f"{found}. {root} has no other complete checkpoint", on_all_ranks=True)
        fix = fix_for(str(root), other)
        raise RuntimeFault(f"{found}. Iteration {other} is complete. Fix: {fix}", on_all_ranks=True)
    if verify and read_checksums(folder) is None:
        logger.info("%s has no checksums (an earlier version wrote it): only sizes were compared", folder)
    return read_common(folder, verify)


def problems_of(folder: Path, verify: bool) -> list[str]:
    """List what is wrong with a checkpoint's files, equal on every rank. Collective.

    Each file is read by one rank.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = []
    try:
        sums = read_checksums(folder) if verify else None
        if sums is not None:
            own += changed_files(folder, sums, rank, ranks)
        read_common(folder, verify)
        if rank == 0:
            own += damage(folder)
    except (Exception, CheckpointException) as error:  # any error, because the other ranks are in a collective
        own.append(in_one_line(error))
    return list(dict.fromkeys(problem for found_there in gather_objects(own) for problem in found_there))


def find_complete(root: Path, iteration: int, verify: bool) -> int | None:
    """Return the newest complete checkpoint before ``iteration``, else after it."""
    saved = [each for each in saved_iterations(root) if each != iteration]
    for each in sorted(saved, key=lambda each: (each > iteration, -each)):
        folder = existing_folder(root, each)
        if folder is not None and not problems_of(folder, verify):
            return each
    return None
