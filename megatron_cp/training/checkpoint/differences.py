"""Differences between a configuration and a checkpoint, and overrides to type."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_cp.common.interpolation import as_written
from megatron_cp.config.names import NAME
from megatron_cp.config.overrides import override
from megatron_cp.config.run_config import default_at
from megatron_cp.rules.remedies import Fix
from megatron_cp.training.checkpoint.files import latest_iteration


def differences(saved: dict[str, Any], now: dict[str, Any], names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return differing settings ("section.field") as (value here, checkpoint's)."""
    found = {}
    for name in names:
        section, field = name.split(".")
        here = now[section][field]
        # A version without this setting behaved as the default does.
        there = saved[section].get(field, default_at(name))
        if there not in (here, as_written(here)):
            found[name] = (here, there)
    return found


def describe(different: dict[str, tuple[Any, Any]]) -> list[str]:
    """Describe each difference."""
    return [f"{name} is {here!r} here and {there!r} in the checkpoint" for name, (here, there) in different.items()]


def overrides(different: dict[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """Return the overrides that set the checkpoint's values."""
    return tuple(override(name, there) for name, (_, there) in different.items())


def checkpoint_fix(setting: str, run: Path, iteration: int | None) -> str:
    """Return what to type for a run's checkpoint, the latest one by default."""
    step = () if iteration is None else (override(NAME.checkpoint.ckpt_step, iteration),)
    return str(Fix((override(setting, str(run)), *step)))


def new_run_fix(save: str | None, folder: Path) -> str:
    """Return what to type for a new run with a checkpoint's weights in a new folder.

    ``save`` is the run's folder.
    """
    root, save = folder.parent, save or str(folder.parent)
    words = [override(NAME.checkpoint.pretrained_checkpoint, str(root)), f"{NAME.checkpoint.load}=null"]
    if latest_iteration(save) is not None:
        number = next(n for n in itertools.count(2) if not Path(f"{save}_{n}").exists())
        words.append(override(NAME.checkpoint.save, f"{save}_{number}"))
    return str(Fix(tuple(words)))
