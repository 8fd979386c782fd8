"""Train from Python: ``from megatron_cp import train``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_cp.common.terminal import say
from megatron_cp.config.run_config import RunConfig
from megatron_cp.launch import launcher
from megatron_cp.rules import Environment, check_or_raise, resolve_auto
from megatron_cp.rules.memory import memory_line
from megatron_cp.rules.remedies import Case

if TYPE_CHECKING:
    from megatron_cp.training.loop import TrainResult


def train(config: RunConfig) -> TrainResult:
    """Train a configuration, or evaluate it with ``train.skip_train=true``.

    In a notebook or a script, this runs a single rank. Under ``python -m megatron_cp.torchrun`` or Slurm, call it on
    every rank. Log lines go to standard error. An interrupt finishes the step, saves and returns.

    Args:
        config: from :func:`megatron_cp.load_recipe`; not modified.

    Returns:
        The first and last loss, the run folder and its ``metrics()``, and the ``exit_code`` of the same command.

    Raises:
        ConfigError: a rule is broken, or a setting names a missing file; ``violations`` lists all of them.
        DataError: a corpus or tokenizer cannot be used.
        RuntimeFault: training cannot continue.
    """
    config = prepared(config)
    from megatron_cp.training.train import run_training  # torch and megatron-core: ten seconds

    return run_training(config)


def prepared(config: RunConfig, gpus_per_node: int | None = None) -> RunConfig:
    """Check and resolve a configuration, and set variables for the import of torch.

    The first rank prints the values of ``auto`` settings and the rules' warnings. Returns the resolved configuration.

    Raises:
        ConfigError: a rule is broken.
    """
    environment, world_size = Environment.detect(), launcher.world_size() or 1
    config, choice = resolve_auto(config, world_size, gpus_per_node, environment)
    warnings = check_or_raise(config, world_size, gpus_per_node, environment)
    if launcher.is_first_rank():
        memory = (
            memory_line(Case(config, world_size, gpus_per_node, environment)) if environment.gpu_memory_gib else None
        )
        lines = [*filter(None, [choice, memory]), *map(str, warnings)]
        say("\n".join(lines), end="\n" if lines else "")
    launcher.add_variables(config.env_vars)  # torch reads some of them at import
    # Our own message reports a lost rank; torch would add a C++ stack per rank and store operation.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return config
