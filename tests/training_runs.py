"""Run tiny training runs on forked ranks, for tests that compare layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron.core.models.mimo  # noqa: F401 - imported once; megatron-core's optimizer would in each rank
import torch

from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.training.batches import Steps
from megatron_cp.training.checkpoint.saver import CheckpointSaver
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import StepResult, train_step

VOCAB = 255  # no round number: the padded rows must not matter


def tiny_config(**overrides: Any) -> RunConfig:
    """Return a finalized float32 configuration.

    ``overrides`` are dotted names with ``__`` for the dot.
    """
    config = RunConfig()
    defaults = {
        "model__num_layers": 4,
        "model__hidden_size": 64,
        "model__ffn_hidden_size": 96,
        "model__num_attention_heads": 8,
        "model__num_query_groups": 4,
        # Large enough that every part of the model matters for the loss: errors in RoPE hide below std 0.02.
        "model__init_method_std": 0.15,
        "model__use_cpu_initialization": True,  # also on a GPU, so that compared layouts start with the same weights
        "dataset__kind": "mock",
        "dataset__seq_length": 32,
        "dataset__mock_masked_fraction": 0.4,
        "tokenizer__tokenizer_type": "NullTokenizer",
        "tokenizer__vocab_size": VOCAB,
        "train__train_iters": 20,
        "train__global_batch_size": 4,
        "optimizer__lr": 1e-3,
        "optimizer__min_lr": 1e-4,
        "scheduler__lr_warmup_iters": 2,
        "mixed_precision__fp32": True,
        "logger__progress": "none",
    }
    for name, value in (defaults | overrides).items():
        section, field = name.split("__", 1)
        holder = getattr(config, section)
        assert hasattr(holder, field), name
        setattr(holder, field, value)
    return config.finalize()


def start(config: RunConfig) -> tuple[Run, Steps]:
    """Set up a run; return it with its global batches from the beginning."""
    tokenizer = build_tokenizer(config.tokenizer)
    train, _, _ = build_datasets(config.dataset, tokenizer, config.train.train_iters * config.train.global_batch_size)
    run = setup(config, tokenizer.vocab_size)
    return run, open_steps(run, train, 0, training=True)


def save_checkpoint(run: Run, root: str | Path, data_state: dict[str, Any]) -> None:
    """Save a checkpoint and wait for it."""
    saver = CheckpointSaver(run, root)
    saver.save(data_state)
    saver.finish()


Losses = list[tuple[float, ...]]  # of each step: loss, gradient norm, requested router losses


def losses_of(result: StepResult) -> tuple[float, ...]:
    return (result.loss, result.grad_norm or 0.0, *result.router_losses.values())


def train_losses(overrides: dict[str, Any], steps: int) -> Losses:
    """Return the losses of ``steps`` optimizer steps; equal on all ranks of a layout."""
    run, batches = start(tiny_config(**overrides))
    results = [train_step(run, next(batches).microbatches) for _ in range(steps)]
    run.close()
    return [losses_of(result) for result in results]


def worst_difference(a: Losses, b: Losses) -> tuple[float, ...]:
    """Return the largest relative difference of losses, norms and router losses."""
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    worst = ((x - y).abs() / y.abs()).max(dim=0).values
    return tuple(worst.tolist())
