"""How a configuration differs from a checkpoint's, and what to type about it."""

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
    """The settings ("section.field") that a checkpoint has otherwise: the value here, and the checkpoint's."""
    found = {}
    for name in names:
        section, field = name.split(".")
        here = now[section][field]
        # A version that did not know a setting did what its default does.
        there = saved[section].get(field, default_at(name))
        if there not in (here, as_written(here)):
            found[name] = (here, there)
    return found


def said(different: dict[str, tuple[Any, Any]]) -> list[str]:
    """Each difference in words."""
    return [f"{name} is {here!r} here and {there!r} in the checkpoint" for name, (here, there) in different.items()]


def overrides(different: dict[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """The overrides that give the checkpoint's values."""
    return tuple(override(name, there) for name, (_, there) in different.items())


def checkpoint_of(setting: str, run: Path, iteration: int | None) -> str:
    """What to type for a run's checkpoint, the latest one by default."""
    step = () if iteration is None else (override(NAME.checkpoint.ckpt_step, iteration),)
    return str(Fix((override(setting, str(run)), *step)))


def begin_new_run(save: str | None, folder: Path) -> str:
    """What to type for a new run with a checkpoint's weights, in a folder that no run has; ``save`` is the run's."""
    root, save = folder.parent, save or str(folder.parent)
    words = [override(NAME.checkpoint.pretrained_checkpoint, str(root)), f"{NAME.checkpoint.load}=null"]
    if latest_iteration(save) is not None:
        number = next(n for n in itertools.count(2) if not Path(f"{save}_{n}").exists())
        words.append(override(NAME.checkpoint.save, f"{save}_{number}"))
    return str(Fix(tuple(words)))
