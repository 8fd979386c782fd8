"""One optimizer step through megatron-core's pipeline schedules.

The loss is the sum over tokens, divided once by the number of unmasked tokens of the global batch. No other
normalization is exact when ranks hold different token counts, as context-parallel ranks do.

The host launches the whole step and synchronizes with the device once, before the parameters change. It then reads the
losses, the gradient norm and the reports of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.config.names import NAME
from megatron_cp.models.layers.router import expert_biases
from megatron_cp.parallel.collectives import pack
from megatron_cp.parallel.device import random_state, restore_random_state
from megatron_cp.training.batches import Microbatch
from megatron_cp.training.forward_backward import PendingLosses, StepLosses, forward_backward
from megatron_cp.training.gradients import (
    apply_gradients,
    clip_queries_and_keys,
    exact_norm,
    forget_max_logits,
    max_attention_logit,
    measure_gradients,
    overflows_in_optimizer,
    unscale_gradients,
)
from megatron_cp.training.monitor.metrics import logger
from megatron_cp.training.monitor.nonfinite import MAX_SKIPPED_IN_A_ROW, gradients_are_finite, origin
from megatron_cp.training.monitor.step_report import StepReport, gather_reports, read_reports
from megatron_cp.training.setup import Run

Report = Callable[[], StepReport]
_OLDER_CHECKPOINT = f"{NAME.checkpoint.ckpt_step}=ITERATION (an older checkpoint)"


@dataclass(frozen=True)
class StepResult(StepLosses):
    """Losses and outcome of one optimizer step; equal on all ranks."""

    grad_norm: float | None = None
    skipped: bool = True  # parameters unchanged: inf or nan, or no token with a loss
    max_attention_logit: float | None = None  # of all layers, before the step; None: not measured
    report: StepReport = field(default_factory=StepReport)  # over all ranks


def train_step(run: Run, microbatches: Sequence[Microbatch], report: Report = StepReport) -> StepResult:
    """Run forward, backward, optimizer and schedule for one global batch.

    Args:
        microbatches: the microbatches of this rank.
        report: makes the report that this rank sends with the losses. Called after everything is launched.
    """
    if not run.config.model.moe_router_enable_expert_bias:
        return _train_step(run, microbatches, report)
    biases = expert_biases(run.model)
    before = [bias.clone() for bias in biases]
    result = _train_step(run, microbatches, report)
    if result.skipped:
        for bias, value in zip(biases, before, strict=True):
            bias.copy_(value)
    return result


def _train_step(run: Run, microbatches: Sequence[Microbatch], report: Report) -> StepResult:
    with run.phases("optimizer"):
        _zero_gradients(run)
        forget_max_logits(run)
    randomness = random_state()
    pending = forward_backward(run, microbatches, forward_only=False)
    with run.phases("optimizer"):
        # With a loss scale the optimizer checks gradients itself, and only in steps with a loss. Until then treat all
        # gradients as suspect.
        scaled = run.core_config.fp16
        unknown = torch.ones(1, dtype=torch.float64, device=run.device)
        gradients = (unknown, unknown) if scaled else measure_gradients(run)
        losses, norm, suspected, reports = _read_results(run, pending, *gradients, report())
        checked = run.config.ddp.check_for_nan_in_grad
        if not math.isfinite(losses.loss) or (checked and suspected and not gradients_are_finite(run)):
            where, damaged = _origin(run, microbatches, randomness)
            _skip_or_stop(run, f"{_not_finite(losses.loss)}; {where}", damaged)
            return StepResult(**vars(losses), report=reports)
        if not losses.tokens:
            # Router losses would be divided by zero, and momentum alone would move the parameters.
            logger.info("iteration %d: no token has a loss; step skipped", run.progress.iteration + 1)
            return StepResult(**vars(losses), report=reports)
        grad_norm = unscale_gradients(run) if scaled else exact_norm(run, norm)
        if grad_norm is None:
            _stop_if_the_scale_is_stuck(run, microbatches, randomness)
            return StepResult(**vars(losses), report=reports)
        if checked and overflows_in_optimizer(run.config.optimizer, grad_norm):
            what = f"the loss is {losses.loss:.6f}, but the gradient norm is {grad_norm:.3g}"
            _skip_or_stop(run, f"{what}: the squared norm overflows float32", fix=f"{NAME.optimizer.clip_grad}=1, or ")
            return StepResult(**vars(losses), grad_norm=grad_norm, report=reports)
        threshold = run.config.optimizer.grad_norm_skip_threshold
        if threshold is not None and grad_norm > threshold:
            what = f"the gradient norm is {grad_norm:.3g}, above {NAME.optimizer.grad_norm_skip_threshold}"
            logger.info("iteration %d: %s. The step is skipped", run.progress.iteration + 1, what)
            return StepResult(**vars(losses), grad_norm=grad_norm, report=reports)
        success, logit = apply_gradients(run.optimizer, grad_norm), max_attention_logit(run)
        if success:
            clip_queries_and_keys(run)
            run.skipped_in_a_row = 0
            run.scheduler.step(increment=run.config.train.global_batch_size)
    return StepResult(
        **vars(losses), grad_norm=grad_norm, skipped=not success, max_attention_logit=logit, report=reports
    )


def _zero_gradients(run: Run) -> None:
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()


def _read_results(
    run: Run, losses: PendingLosses, norm: torch.Tensor, suspected: torch.Tensor, report: StepReport
) -> tuple[StepLosses, float, bool, StepReport]:
    """Read losses, gradient norm, non-finite flag and all ranks' reports. Collective.

    The only place in a step where the host waits for the device.
    """
    reports = gather_reports(report, suspected, run.all_ranks)
    parts = [norm, reports.flatten(), pack(losses)]
    norm, numbers, packed = torch.cat(parts).cpu().split([part.numel() for part in parts])
    return losses.read(packed), norm.item(), *read_reports(numbers.view_as(reports), report)


def _origin(run: Run, microbatches: Sequence[Microbatch], randomness: dict[str, Any]) -> tuple[str, bool]:
    """Locate the first non-finite number; also return whether parameters are damaged."""

    def repeat() -> float:
        restore_random_state(randomness)
        _zero_gradients(run)
        return forward_backward(run, microbatches, forward_only=False).read().loss

    return origin(run, repeat)


def _not_finite(loss: float) -> str:
    return f"the loss is {loss}" if not math.isfinite(loss) else f"the loss is {loss:.6f}, but gradients are not finite"


def _skip_or_stop(run: Run, what: str, damaged: bool = False, fix: str = "") -> None:
    """Skip a step with invalid numbers (described by ``what``), or stop the run.

    Raises:
        RuntimeFault: on every rank, if the step must not be skipped.
    """
    what = f"iteration {run.progress.iteration + 1}: {what}"
    run.skipped_in_a_row += 1
    if run.config.train.on_nonfinite == "stop" or damaged or run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        if run.config.train.on_nonfinite == "stop" and not damaged:
            fix += f"{NAME.train.on_nonfinite}=skip (skips such steps), or "
        elif not damaged:
            what += f"; {run.skipped_in_a_row} steps in a row were skipped"
        fix += _OLDER_CHECKPOINT
        raise RuntimeFault(f"{what}. The parameters were not changed. Fix: {fix}", on_all_ranks=True)
    logger.info("%s; step skipped", what)


def _stop_if_the_scale_is_stuck(run: Run, microbatches: Sequence[Microbatch], randomness: dict[str, Any]) -> None:
    """Stop an fp16 run that keeps overflowing at the lowest loss scale.

    Raises:
        RuntimeFault: on every rank.
    """
    precision = run.config.mixed_precision
    scale = float(run.optimizer.get_loss_scale())
    if precision.loss_scale is None and scale > precision.min_loss_scale:
        return
    run.skipped_in_a_row += 1
    if run.skipped_in_a_row < MAX_SKIPPED_IN_A_ROW:
        return
    where, _ = _origin(run, microbatches, randomness)
    setting, other = NAME.mixed_precision.min_loss_scale, "mixed_precision=bf16_mixed"
    if precision.loss_scale is not None:
        setting, other = NAME.mixed_precision.loss_scale, f"{NAME.mixed_precision.loss_scale}=null (searches for one)"
    raise RuntimeFault(
        f"iteration {run.progress.iteration + 1}: gradients overflow at the loss scale {setting}={scale:g}, and "
        f"{run.skipped_in_a_row} steps in a row were skipped; {where}. The parameters were not changed. "
        f"Fix: {setting}={scale / 2:g}, or {other}, or {_OLDER_CHECKPOINT}",
        on_all_ranks=True,
    )
