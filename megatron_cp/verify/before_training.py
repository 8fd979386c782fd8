"""``megatron-cp train --verify``: compare a run's layout with one rank before its first step, once."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_cp.common.atomic_files import write_text
from megatron_cp.common.errors import RuntimeFault
from megatron_cp.common.input_files import read_json
from megatron_cp.config.run_config import (
    CheckpointConfig,
    LoggerConfig,
    ProfilingConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
)
from megatron_cp.config.single_rank import on_one_rank
from megatron_cp.launch import launcher
from megatron_cp.parallel.collectives import broadcast_object
from megatron_cp.rules import Environment
from megatron_cp.training.consistency import digest, fingerprint
from megatron_cp.training.monitor.sinks import writing_into
from megatron_cp.verify.compare import compare_with_one_rank
from megatron_cp.verify.reduce import checked, comparable
from megatron_cp.verify.report import diagnose

logger = logging.getLogger(__name__)

FILE = "verified_layouts.json"
STEPS = 2


def verify_once(config: RunConfig) -> None:
    """Verify a layout at reduced size, on the run's own ranks, unless its run folder says that it was. Collective.

    All process groups are gone afterwards, as before.

    Raises:
        RuntimeFault: on every rank, where the layout does not train the same model as one rank.
    """
    world_size = dist.get_world_size()
    (small,) = comparable([config], world_size, STEPS)
    reduced = checked(small, world_size)
    file, layout, key = Path(config.checkpoint.save or "", FILE), describe(config, world_size), _key(reduced)
    known, key = broadcast_object((_read(file), key))
    if key in known:
        logger.info("layout verified before, not verified again: %s (%s, %s)", layout, file, known[key]["time"])
        return
    began = time.monotonic()
    with _quiet():
        result = compare_with_one_rank(reduced, on_one_rank(reduced))
    if not result.equal:
        raise RuntimeFault(
            f"layout={layout}: not the same model as on one rank, nothing was trained: "
            f"{'; '.join(diagnose(result))}. Fix: type 'verify' in place of 'train --verify' to see all that differs, "
            "and choose another layout or model.cp_comm_type.",
            on_all_ranks=True,
        )
    if dist.get_rank() == 0:
        _write(file, known | {key: {"layout": layout, "time": time.strftime("%Y-%m-%d %H:%M:%S")}})
    logger.info(
        "layout verified in %.1f s, the same model as on one rank: %s; %d parameters, %d steps, reduced size; "
        "remembered in %s",
        time.monotonic() - began,
        layout,
        result.gradients.number,
        STEPS,
        file,
    )


def describe(config: RunConfig, world_size: int) -> str:
    """A layout in a few words."""
    model = config.model
    sizes = {
        "tp": model.tensor_model_parallel_size,
        "cp": f"{model.context_parallel_size} {'/'.join(model.transports)}",
        "pp": model.pipeline_model_parallel_size,
        "ep": model.expert_model_parallel_size,
        "dp": config.data_parallel_size(world_size),
    }
    return f"{world_size} rank{'s' * (world_size > 1)} ({', '.join(f'{name} {size}' for name, size in sizes.items())})"


def _key(reduced: RunConfig) -> str:
    """What was verified and with what: the reduced configuration, this package's code, libraries, device, variables."""
    train = TrainConfig(
        global_batch_size=reduced.train.global_batch_size, micro_batch_size=reduced.train.micro_batch_size
    )
    # Without what may change from start to start and does not change what is computed.
    layout = replace(
        reduced,
        train=train,
        validation=ValidationConfig(),
        checkpoint=CheckpointConfig(),
        logger=LoggerConfig(),
        profiling=ProfilingConfig(),
        env_vars={},
        recipe="",
        recipe_world_size=None,
    )
    ranks = {"ranks": f"{dist.get_world_size()}, {launcher.local_world_size()} a node"}
    return digest(fingerprint(layout, Environment.detect()) | ranks)


def _read(file: Path) -> dict[str, Any]:
    """What was verified before; nothing where the file cannot be read, which costs one more verification."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        found = read_json(file)
        return {key: value for key, value in found.items() if "time" in value}
    return {}


def _write(file: Path, known: dict[str, Any]) -> None:
    with writing_into(file.parent):
        write_text(file, json.dumps(known, indent=1) + "\n")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines of the small runs, which would read like the run's own."""
    ours = logging.getLogger("megatron_cp")
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)
