"""What a configuration computes: losses and gradient norms of a few steps, and all gradients of the first."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_cp.attention.probe import ProbeError, probe_attention
from megatron_cp.config import RunConfig
from megatron_cp.data.datasets import build_datasets
from megatron_cp.data.tokenizers import build_tokenizer
from megatron_cp.training.batches import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import StepResult, train_step
from megatron_cp.verify.shards import copy_of, gather_gradients, load_parameters, parameter_parts


@dataclass
class Measurement:
    """Of one rank: the steps' results are the same on all, the tensors are this rank's parts."""

    steps: list[StepResult] = field(default_factory=list)
    weights: list[ShardedTensor] = field(default_factory=list)  # as drawn, before the first step
    gradients: list[ShardedTensor] = field(default_factory=list)  # of the first step, reduced and scaled, not clipped
    probe: str | None = None  # what the attention probe said, None if nothing


def measure(
    config: RunConfig, groups: ProcessGroupCollection | None = None, weights: list[ShardedTensor] | None = None
) -> Measurement:
    """Train ``train.train_iters`` steps as configured. Collective over the ranks of the run.

    Args:
        groups: the run's process groups; built from the configuration over all ranks by default.
        weights: the parts of the initial weights that this rank holds; drawn from the seed by default.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    train_iters = config.train.train_iters
    dataset = build_datasets(config, tokenizer, train_iters * config.train.global_batch_size).train
    assert dataset is not None
    run = setup(config, tokenizer.vocab_size, groups)
    try:
        result = Measurement(probe=_probe(run) if groups is None else None)
        if weights is None:
            result.weights = copy_of(parameter_parts(run, lambda parameter: parameter))
        else:
            load_parameters(run, weights)
        _keep_first_gradients(run, result)
        with closing(open_steps(run, dataset, 0, training=True)) as steps:
            for _ in range(train_iters):
                result.steps.append(train_step(run, next(steps).microbatches))
        return result
    finally:
        run.close()


def _probe(run: Run) -> str | None:
    try:
        probe_attention(run.model)
    except ProbeError as error:
        return str(error)
    return None


def _keep_first_gradients(run: Run, result: Measurement) -> None:
    """Copy the gradients between their reduction and the optimizer, which clips them in place."""
    finalize = run.core_config.finalize_model_grads_func

    def finalize_and_keep(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        if not result.gradients:
            gather_gradients(run)
            result.gradients = copy_of(parameter_parts(run, _gradient))

    run.core_config.finalize_model_grads_func = finalize_and_keep


def _gradient(saved: torch.Tensor) -> torch.Tensor | None:
    return saved.main_grad if isinstance(saved, torch.nn.Parameter) else None  # type: ignore[attr-defined]
