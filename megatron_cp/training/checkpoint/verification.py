"""Whether a checkpoint is as it was written, the same answer on every rank, and which other one to go on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.common.errors import ConfigError, RuntimeFault, UnusableCheckpoint
from megatron_cp.common.limits import reached_limit
from megatron_cp.config.overrides import override
from megatron_cp.config.run_config import RunConfig
from megatron_cp.parallel.collectives import everyones
from megatron_cp.rules.remedies import Fix
from megatron_cp.training.checkpoint.checksums import changed_files, read_checksums
from megatron_cp.training.checkpoint.content import read_common
from megatron_cp.training.checkpoint.files import damage, existing_folder, saved_iterations
from megatron_cp.training.checkpoint.resume import find_start
from megatron_cp.training.monitor.metrics import logger


def checked_common(config: RunConfig, folder: Path, iteration: int) -> dict[str, Any]:
    """Compare a checkpoint's bytes with their checksums; returns what it holds beside tensors. Collective.

    Raises:
        RuntimeFault: on every rank, where any rank finds it damaged. Says which other checkpoint is complete.
    """
    verify = config.checkpoint.verify_checksums
    problems = problems_of(folder, verify)
    if problems:
        found = f"checkpoint {folder} cannot be read: {'; '.join(problems[:4])}"
        raise RuntimeFault(f"{found}. {_how_to_go_on(config, folder, iteration)}", on_all_ranks=True)
    if verify and read_checksums(folder) is None and _is_first():
        logger.info("%s has no checksums (an earlier version wrote it): only sizes were compared", folder)
    return read_common(folder, verify)


def problems_of(folder: Path, verify: bool) -> list[str]:
    """What is wrong with a checkpoint's files, the same on every rank; each file is read by one of them. Collective."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = []
    try:
        sums = read_checksums(folder) if verify else None
        if sums is not None:
            mine += changed_files(folder, sums, rank, ranks)
        read_common(folder, verify)
        if rank == 0:
            mine += damage(folder)
    except (Exception, CheckpointException) as error:  # also of a rank alone, whose others would wait
        mine.append(describe(error))
    return list(dict.fromkeys(problem for theirs in everyones(mine) for problem in theirs))


def complete_beside(root: Path, iteration: int, verify: bool) -> int | None:
    """The newest complete checkpoint before another one, else the newest after it, if there is one. Collective."""
    saved = [each for each in saved_iterations(root) if each != iteration]
    for each in sorted(saved, key=lambda each: (each > iteration, -each)):
        folder = existing_folder(root, each)
        if folder is not None and not problems_of(folder, verify):
            return each
    return None


def _how_to_go_on(config: RunConfig, folder: Path, iteration: int) -> str:
    root = folder.parent
    other = complete_beside(root, iteration, config.checkpoint.verify_checksums)
    if other is None:
        return f"{root} has no other complete checkpoint"
    return f"Iteration {other} is complete. Fix: {begin_with(config, str(root), other)}"


def begin_with(config: RunConfig, root: str, iteration: int) -> str:
    """The settings with which this run would begin with another checkpoint."""
    away: dict[str, Any] = {"load": root, "pretrained_checkpoint": None, "finetune": False}
    for names in ([], ["load"], ["load", "pretrained_checkpoint"], list(away)):
        changed = {name: away[name] for name in names} | {"ckpt_step": iteration}
        try:
            start = find_start(replace(config, checkpoint=replace(config.checkpoint, **changed)))
        except ConfigError:
            continue
        if start is not None and Path(start.root) == Path(root) and start.iteration == iteration:
            break
    return str(Fix(tuple(override(f"checkpoint.{name}", value) for name, value in changed.items())))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def describe(error: BaseException) -> str:
    """One line; torch's ``CheckpointException`` (not an ``Exception``) holds the ranks' own errors and tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, UnusableCheckpoint):
        return str(error)
    first_line = str(error).splitlines()[0] if str(error) else "no details"
    limit = reached_limit(error)
    return f"{type(error).__name__}: {first_line}{f' ({limit})' if limit else ''}"
