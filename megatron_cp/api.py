"""Train from Python: what ``from megatron_cp import train`` gives."""

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
    """Train a configuration, or with ``train.skip_train=true`` evaluate it.

    In a notebook or a script of its own this is one rank; under ``python -m megatron_cp.torchrun`` or Slurm, call it on
    every rank. Log lines go to standard error. Interrupting finishes the step, saves and returns.

    Args:
        config: of :func:`megatron_cp.load_recipe`. It is not changed.

    Returns:
        the first and last loss, the run's folder and its ``metrics()``, and the ``exit_code`` of the same command.

    Raises:
        ConfigError: a rule is broken, or a setting names what is not there; ``violations`` lists all of them.
        DataError: a corpus or tokenizer cannot be used.
        RuntimeFault: training cannot go on.
    """
    config = prepared(config)
    from megatron_cp.training.train import run_training  # torch and megatron-core: ten seconds

    return run_training(config)


def prepared(config: RunConfig, gpus_per_node: int | None = None) -> RunConfig:
    """Check a configuration for this process's ranks, and set up what must be set before torch is imported.

    Prints on the first rank what ``auto`` settings come to and what rules warn of; returns the resolved configuration.

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
    launcher.add_variables(config.env_vars)  # before torch, which reads some as it is imported
    # Where a rank is lost we say so; torch would add a C++ stack for each rank and store operation.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return config
