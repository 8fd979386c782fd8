"""One optimizer step through megatron-core's own pipeline schedules.

The loss is always the sum over tokens, divided once by the number of unmasked tokens of the whole global batch: the
only normalization that is exact when ranks hold different numbers of them, as context-parallel ranks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_cp.dynamic_cp.packing import PackedMicrobatch
from megatron_cp.parallel.pipeline import PipelineCommunicator
from megatron_cp.training.setup import Run

Batch = dict[str, torch.Tensor]
Microbatches = Iterator[Batch | PackedMicrobatch]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. Equal on all ranks."""

    loss: float  # mean over the unmasked tokens of the global batch
    tokens: int  # unmasked tokens of the global batch
    grad_norm: float | None
    skipped: bool  # the optimizer found inf or nan and left the parameters as they were


def train_step(run: Run, batches: Microbatches, num_microbatches: int) -> StepResult:
    """Forward, backward, gradient reduction, optimizer and schedule for one global batch."""
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    loss, tokens = _forward_backward(run, batches, num_microbatches, forward_only=False)
    success, grad_norm, _ = run.optimizer.step()
    if success:
        run.scheduler.step(increment=run.config.train.global_batch_size)
    return StepResult(loss, tokens, None if grad_norm is None else float(grad_norm), not success)


def evaluate(run: Run, batches: Microbatches, num_microbatches: int, steps: int) -> float:
    """Mean loss per unmasked token over ``steps`` global batches, without touching the model."""
    for chunk in run.model:
        chunk.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for _ in range(steps):
            loss, count = _forward_backward(run, batches, num_microbatches, forward_only=True)
            total, tokens = total + loss * count, tokens + count
    for chunk in run.model:
        chunk.train()
    return total / max(tokens, 1)


def _forward_backward(run: Run, batches: Microbatches, num_microbatches: int, forward_only: bool) -> tuple[float, int]:
    """Run the pipeline schedule; returns the mean loss per unmasked token and their number, on every rank."""
    model = run.config.model
    stages = model.virtual_pipeline_model_parallel_size
    # All of them before the first one runs: a rank that finds fault with its batches can tell the others only while
    # none of them waits for another in the pipeline. Every virtual stage then walks them at its own pace.
    window = [next(batches) for _ in range(num_microbatches)]
    schedule = get_forward_backward_func(pp_size=model.pipeline_model_parallel_size, vp_size=stages)
    communicator = PipelineCommunicator(run.groups.pp, run.core_config)
    reports = schedule(
        forward_step_func=forward_step,
        data_iterator=iter(window) if stages is None else [iter(window) for _ in range(stages)],
        model=run.model if stages is not None else run.model[0],
        num_microbatches=num_microbatches,
        seq_length=model.seq_length,
        micro_batch_size=_tokens(window[0]).shape[0],  # evaluation may have another one than training
        forward_only=forward_only,
        p2p_communicator=communicator,
        pg_collection=run.groups,
    )
    communicator.finish()
    return _reduce_loss(run, reports)


def _tokens(batch: Batch | PackedMicrobatch) -> torch.Tensor:
    return batch.tokens if isinstance(batch, PackedMicrobatch) else batch["tokens"]


def forward_step(batches: Microbatches, model: Any) -> tuple[torch.Tensor, Callable]:
    """megatron-core's forward-step contract: one microbatch through this rank's chunk."""
    batch = next(batches)
    values: dict[str, Any] = vars(batch) if isinstance(batch, PackedMicrobatch) else batch
    output = model(
        input_ids=values["tokens"],
        position_ids=values["position_ids"],
        attention_mask=None,
        labels=values["labels"],
        packed_seq_params=values.get("packed_seq_params"),
    )
    return output, partial(loss_function, values["loss_mask"])


def loss_function(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum of the per-token losses ``[b, s_local]`` under the mask, the number of unmasked tokens, and the report."""
    loss_mask = loss_mask.reshape(-1).float()
    total = (losses.float().reshape(-1) * loss_mask).sum()
    tokens = loss_mask.sum()
    report = torch.stack([total.detach().double(), tokens.double()])
    return total, tokens.to(torch.int), {"lm loss": report}


def _reduce_loss(run: Run, reports: list[Batch]) -> tuple[float, int]:
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    for report in reports:
        total += report["lm loss"]
    if run.is_last_stage:
        dist.all_reduce(total, group=run.groups.dp_cp)
    if run.groups.pp.size() > 1:
        source = dist.get_process_group_ranks(run.groups.pp)[-1]
        dist.broadcast(total, src=source, group=run.groups.pp)
    loss_sum, tokens = total.tolist()
    return loss_sum / max(tokens, 1.0), int(tokens)
