"""Train tiny packed runs, and the same samples one by one on a single rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_cp.attention.modules.native import ContextParallelAttention
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import build_tokenizer
from megatron_cp.dynamic_cp.runtime.packing import BlockGroups, PackedMicrobatch, Sample, lay_out
from megatron_cp.rules import check_or_raise
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.step import train_step
from tests.training_runs import Losses, losses_of, tiny_config

LONGEST, BATCH, STEPS = 128, 12, 10
DYNAMIC = {"model__dynamic_context_parallel": True}
BALANCED = {"model__sequence_packing_scheduler": "dp_balanced"}


def lengths_file(folder: Path) -> str:
    """Write long-tailed lengths, with odd ones and the longest allowed."""
    lengths = np.random.default_rng(3).choice([5, 17, 40, 9, 3, 64, LONGEST, 23, 1, 12, 31], size=70)
    path = folder / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)))
    return str(path)


def packed_config(lengths: str, overrides: dict[str, Any]) -> RunConfig:
    defaults: dict[str, Any] = {
        "dataset__kind": "mock_documents",
        "dataset__mock_lengths": lengths,
        "dataset__seq_length": LONGEST,
        "train__global_batch_size": BATCH,
        "train__train_iters": STEPS,
    }
    return tiny_config(**defaults | overrides)


def train_dataset(config: RunConfig) -> Any:
    samples = config.train.train_iters * config.train.global_batch_size
    dataset = build_datasets(config.dataset, build_tokenizer(config.tokenizer), samples).train
    assert dataset is not None
    return dataset


def check_transports(run: Run) -> None:
    """Check that every layer's packs used the configured transport.

    Any other computes the same.
    """
    kind = run.config.model.cp_comm_type
    for module in (module for chunk in run.model for module in chunk.modules()):
        if isinstance(module, ContextParallelAttention):
            used = {context.comm_type for context in module._contexts.values()}
            # Where a group has more ranks than heads, all-to-all is combined with a ring.
            assert kind in used and used <= {kind, "a2a+p2p" if kind == "a2a" else kind}, (kind, used)


def packed_losses(
    lengths: str, overrides: dict[str, Any], environment: str = "cpu", steps: int | None = None
) -> tuple[Losses, list[dict[int, int]], set[int]]:
    """Return each step's losses and groups by CP size.

    Also the number of microbatches of this rank.
    """
    config = packed_config(lengths, overrides)
    check_or_raise(config, dist.get_world_size(), environment=environment)
    tokenizer = build_tokenizer(config.tokenizer)
    run = setup(config, tokenizer.vocab_size)
    losses, sizes, counts = [], [], set()
    shapes: set[int] = set()
    with closing(open_steps(run, train_dataset(config), 0, training=True)) as batches:
        for _ in range(steps or STEPS):
            step = next(batches)
            assert step.plan is not None
            result = train_step(run, step.microbatches)
            run.progress.iteration += 1
            batches.observe()
            losses.append(losses_of(result))
            sizes.append(step.plan.cp_sizes)
            counts.add(len(step.microbatches))
            shapes |= {microbatch.tokens.numel() for microbatch in step.microbatches}  # type: ignore[union-attr]
    check_transports(run)
    assert len(shapes) <= (config.model.packed_shape_buckets or len(shapes)), shapes
    run.close()
    return losses, sizes, counts


def pack(samples: Sequence[Sample], group: dist.ProcessGroup, device: torch.device | str = "cpu") -> PackedMicrobatch:
    """Return this rank's shard of a pack of these samples on ``group``."""
    return lay_out(samples, group.rank(), group.size()).on(device, BlockGroups(group))


Packs = list[list[list[int]]]


def packs_of(lengths: str, overrides: dict[str, Any]) -> Packs:
    """Return the samples of each pack of each step, as these ranks train them.

    Samples are numbered within the step.
    """
    config = packed_config(lengths, overrides | {"model__dynamic_context_parallel_calibration_iters": 0})
    run, found = setup(config, build_tokenizer(config.tokenizer).vocab_size), []
    with closing(open_steps(run, train_dataset(config), 0, training=True)) as steps:
        for _ in range(STEPS):
            plan = next(steps).plan
            assert plan is not None
            found.append([list(group.sample_ids) for groups in plan.schedule.microbatches for group in groups])
            run.progress.iteration += 1
            steps.observe()
    run.close()
    return found


def one_by_one(lengths: str, overrides: dict[str, Any], packs: Packs | None = None, steps: int | None = None) -> Losses:
    """Train the same samples on one rank, one per microbatch, or in the given packs."""
    config = packed_config(lengths, BALANCED | overrides)
    run = setup(config, build_tokenizer(config.tokenizer).vocab_size)
    source, losses = train_dataset(config), []
    for step, first in enumerate(range(0, (steps or STEPS) * BATCH, BATCH)):
        samples = [source[index] for index in range(first, first + BATCH)]
        together = packs[step] if packs else [[i] for i in range(BATCH)]
        microbatches = [pack([samples[i] for i in ids], run.groups.cp, device=run.device) for ids in together]
        result = train_step(run, microbatches)
        losses.append(losses_of(result))
    run.close()
    return losses
