"""Run a comparison: ``verify``, or before training (``train --verify``)."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from megatron_cp.common.atomic_files import write_text
from megatron_cp.common.errors import RuntimeFault, is_local_failure
from megatron_cp.common.input_files import read_json
from megatron_cp.common.terminal import quiet
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.launch import launcher
from megatron_cp.mcore.packages import check_mamba_ssm
from megatron_cp.parallel.collectives import broadcast_object, run_on_first_rank
from megatron_cp.parallel.device import start_distributed, stop_distributed
from megatron_cp.rules import Environment, checked
from megatron_cp.training.consistency import check_consistency, digest, fingerprint
from megatron_cp.training.monitor.metrics import start_logging
from megatron_cp.training.monitor.sinks import writing_into
from megatron_cp.verify.compare import compare_layouts, compare_with_single_rank
from megatron_cp.verify.reduce import comparable
from megatron_cp.verify.report import diagnose, show

logger = logging.getLogger(__name__)

FILE = "verified_layouts.json"
STEPS = 2


def verify(configs: Sequence[RunConfig], names: tuple[str, str]) -> bool:
    """Compare two layouts, or one with a single rank; return whether they are equal."""
    layout, rank = configs[-1], launcher.rank()
    start_logging(rank, live=False)
    if "M" in layout.model.layer_letters:
        check_mamba_ssm()
    start_distributed(layout.dist)
    try:
        check_consistency(asdict(layout))
        if len(configs) == 2:
            result = compare_layouts(*configs)
        else:
            result = compare_with_single_rank(layout, on_single_rank(layout))
        console = Console(width=None if sys.stdout.isatty() else 120)
        # Other ranks wait here: a launcher stops all ranks as soon as one has failed.
        run_on_first_rank(lambda: show(result, names, console), "the comparison could not be shown")
        return result.equal
    finally:
        stop_distributed(alone=is_local_failure(sys.exception()))


def verify_once(config: RunConfig) -> None:
    """Verify a layout at reduced size before training, unless recorded as verified.

    Collective; leaves no process groups.

    Raises:
        RuntimeFault: on every rank, if results differ from a single rank.
    """
    world_size = dist.get_world_size()
    (small,) = comparable([config], world_size, STEPS)
    reduced = checked(small, world_size)
    file, layout, key = Path(config.checkpoint.save or "", FILE), describe(config.model, world_size), _key(reduced)
    known, key = broadcast_object((_read(file), key))
    if key in known:
        logger.info("layout verified before, not verified again: %s (%s, %s)", layout, file, known[key]["time"])
        return
    began = time.monotonic()
    with quiet():  # hide log lines of the small runs
        result = compare_with_single_rank(reduced, on_single_rank(reduced))
    if not result.equal:
        raise RuntimeFault(
            f"layout={layout}: results differ from a single rank; training not started: "
            f"{'; '.join(diagnose(result))}. Fix: replace 'train --verify' by 'verify' to see all differences, or "
            f"choose another layout or {NAME.model.cp_comm_type}",
            on_all_ranks=True,
        )
    if dist.get_rank() == 0:
        _write(file, known | {key: {"layout": layout, "time": time.strftime("%Y-%m-%d %H:%M:%S")}})
    logger.info(
        "layout verified in %.1f s, results match a single rank: %s; %d parameters, %d steps, reduced size; "
        "recorded in %s",
        time.monotonic() - began,
        layout,
        result.gradients.number,
        STEPS,
        file,
    )


def describe(model: ModelConfig, world_size: int) -> str:
    """Describe a layout briefly."""
    sizes = {
        "tp": model.tensor_model_parallel_size,
        "cp": f"{model.context_parallel_size} {'/'.join(model.transports)}",
        "pp": model.pipeline_model_parallel_size,
        "ep": model.expert_model_parallel_size,
        "dp": model.data_parallel_size(world_size),
    }
    return f"{world_size} rank{'s' * (world_size > 1)} ({', '.join(f'{name} {size}' for name, size in sizes.items())})"


def _key(reduced: RunConfig) -> str:
    """Return a digest of what was verified.

    Covers the reduced configuration, this package's code, libraries, device and variables.
    """
    settings = asdict(reduced)
    # Leave out settings that may change between starts without effect on results.
    for name in ("validation", "checkpoint", "logger", "profiling", "env_vars", "recipe", "recipe_world_size"):
        del settings[name]
    settings["train"] = (reduced.train.global_batch_size, reduced.train.micro_batch_size)
    ranks = {"ranks": f"{dist.get_world_size()}, {launcher.local_world_size()} a node"}
    return digest(fingerprint(settings, Environment.detect()) | ranks)


def _read(file: Path) -> dict[str, Any]:
    """Read earlier verifications; nothing if unreadable, at the cost of one more run."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        found = read_json(file)
        return {key: value for key, value in found.items() if "time" in value}
    return {}


def _write(file: Path, known: dict[str, Any]) -> None:
    with writing_into(file.parent):
        write_text(file, json.dumps(known, indent=1) + "\n")
