"""Settings in which an evaluation differs from the run whose folder it writes to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import DatasetConfig, TokenizerConfig, ValidationConfig

_WITHOUT_EFFECT = ("path_to_cache", "num_workers")  # data settings without effect on the loss


def differences_from_run(measured: dict[str, Any], folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Return data settings and checkpoint in which an evaluation differs from the run.

    Args:
        measured: the evaluation's :func:`held_out_settings`.
        folder: holds the run's ``config.yaml``; without this file no setting differs.
        checkpoint: where the evaluated weights come from.
    """
    unlike: dict[str, Any] = {}
    if checkpoint.resolve() != folder.resolve():
        unlike[NAME.checkpoint.load] = str(checkpoint)
    written = folder / "config.yaml"
    if not written.is_file():
        return unlike
    try:
        run = load_recipe(written)
    except ConfigError:  # for example of an older version
        return unlike
    own = held_out_settings(run.dataset, run.tokenizer, run.validation, run.evaluation_batch[0])
    return unlike | {name: value for name, value in measured.items() if value != own.get(name)}


def held_out_settings(
    data: DatasetConfig, tokenizer: TokenizerConfig, validation: ValidationConfig, samples: int
) -> dict[str, Any]:
    """Return all settings that determine an evaluation's samples.

    ``samples``: of a global batch.
    """
    number: dict[str, Any] = {NAME.validation.full_validation: validation.full_validation}
    if not validation.full_validation:
        number |= {NAME.validation.eval_iters: validation.eval_iters, NAME.validation.eval_global_batch_size: samples}
    sections = {"dataset": asdict(data), "tokenizer": asdict(tokenizer)}
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
        if name not in _WITHOUT_EFFECT
    } | number
