"""One optimizer step through megatron-core's own pipeline schedules.

The loss is always the sum over tokens, divided once by the number of unmasked tokens of the whole global batch: the
only normalization that is exact when ranks hold different numbers of them, as context-parallel ranks do.

The host launches all of a step, and waits for the device once, before the parameters change: for the losses, the
gradients' norm and what ranks have to tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.data.batches import Batch
from megatron_cp.dynamic_cp.runtime.packing import PackedMicrobatch
from megatron_cp.models.layers.mtp import depth_weights, unmasked_tokens
from megatron_cp.models.layers.router import expert_biases
from megatron_cp.models.layers.router_losses import RouterLosses
from megatron_cp.parallel.device import random_state, restore_random_state
from megatron_cp.parallel.pipeline import PipelineCommunicator
from megatron_cp.parallel.transfer import send
from megatron_cp.training.batches import Microbatch, Steps
from megatron_cp.training.gradients import (
    apply_gradients,
    exact_norm,
    measure_gradients,
    overflows_in_optimizer,
    unscale_gradients,
)
from megatron_cp.training.monitor.metrics import logger
from megatron_cp.training.monitor.nonfinite import MAX_SKIPPED_IN_A_ROW, gradients_are_finite, origin
from megatron_cp.training.setup import Run

Tell = Callable[[], Sequence[float]]


class StepLosses(NamedTuple):
    """What was computed of one global batch. Equal on all ranks."""

    loss: float  # mean over the unmasked tokens of the global batch
    tokens: int  # unmasked tokens of the global batch
    mtp_losses: tuple[float, ...]  # of each depth of multi-token prediction, over its own unmasked tokens
    router_losses: dict[str, float]  # by megatron-core's names, without their weights


@dataclass(frozen=True)
class _Sums:
    """What a global batch's losses follow from, on the device, which may still compute it. Equal on all ranks."""

    numbers: torch.Tensor
    losses: Callable[[Sequence[float]], StepLosses]

    def read(self) -> StepLosses:
        """Wait for them."""
        return self.losses(self.numbers.tolist())


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: its losses (:class:`StepLosses`) and what came of them. Equal on all ranks."""

    loss: float
    tokens: int
    mtp_losses: tuple[float, ...]
    router_losses: dict[str, float]
    grad_norm: float | None = None
    skipped: bool = True  # the parameters are as they were: inf or nan, or no token with a loss
    told: tuple[tuple[float, ...], ...] = ()  # each number as all ranks told it, in their order


def train_step(run: Run, microbatches: Sequence[Microbatch], tell: Tell = lambda: ()) -> StepResult:
    """Forward, backward, gradient reduction, optimizer and schedule for one global batch, this rank's microbatches.

    ``tell``: numbers that all ranks are told with the losses, as many on each. Asked for when all is launched.
    """
    if not run.config.model.moe_router_enable_expert_bias:
        return _train_step(run, microbatches, tell)
    biases = expert_biases(run.model)
    before = [bias.clone() for bias in biases]
    result = _train_step(run, microbatches, tell)
    if result.skipped:
        for bias, value in zip(biases, before, strict=True):
            bias.copy_(value)
    return result


def _train_step(run: Run, microbatches: Sequence[Microbatch], tell: Tell) -> StepResult:
    with run.phases("optimizer"):
        _forget_gradients(run)
    randomness = random_state()
    sums = _forward_backward(run, microbatches, forward_only=False)
    with run.phases("optimizer"):
        # With a loss scale the optimizer looks at gradients by itself, and only at those of a step that has a loss;
        # until then all are suspected.
        scaled = run.core_config.fp16
        gradients = torch.ones(2, dtype=torch.float64, device=run.device) if scaled else measure_gradients(run)
        losses, norm, suspected, told = _read_at_once(run, sums, gradients, tell)
        checked = run.config.ddp.check_for_nan_in_grad
        if not math.isfinite(losses.loss) or (checked and suspected and not gradients_are_finite(run)):
            where, damaged = _origin(run, microbatches, randomness)
            _skip_or_stop(run, f"{_not_finite(losses.loss)}; {where}", damaged)
            return StepResult(*losses, told=told)
        if not losses.tokens:
            # A router's losses would be divided by nothing, and momentum alone would move the parameters.
            logger.info("iteration %d: no token has a loss. The step is left out", run.progress.iteration + 1)
            return StepResult(*losses, told=told)
        grad_norm = unscale_gradients(run) if scaled else exact_norm(run, norm)
        if grad_norm is None:
            _stop_if_the_scale_is_stuck(run, microbatches, randomness)
            return StepResult(*losses, told=told)
        if checked and overflows_in_optimizer(run.config.optimizer, grad_norm):
            what = f"the loss is {losses.loss:.6f}, but the gradients' norm is {grad_norm:.3g}"
            _skip_or_stop(run, f"{what}: its square overflows float32 in the optimizer. optimizer.clip_grad=1 clips it")
            return StepResult(*losses, grad_norm=grad_norm, told=told)
        success = apply_gradients(run.optimizer, grad_norm)
        if success:
            run.skipped_in_a_row = 0
            run.scheduler.step(increment=run.config.train.global_batch_size)
    return StepResult(*losses, grad_norm=grad_norm, skipped=not success, told=told)


def _forget_gradients(run: Run) -> None:
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()


def _read_at_once(
    run: Run, sums: _Sums, gradients: torch.Tensor, tell: Tell
) -> tuple[StepLosses, float, bool, tuple[tuple[float, ...], ...]]:
    """The losses, the gradients' norm, whether any rank suspects its gradients, and what each rank tells. Collective.

    The only place of a step where the host waits for the device.
    """
    norm, suspected = gradients.split(1)
    mine = torch.cat([suspected, send(torch.tensor(tell(), dtype=torch.float64), run.device)])
    everyone = mine.new_empty(run.all_ranks.size() * len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=run.all_ranks)
    numbers = torch.cat([norm, everyone, sums.numbers]).tolist()
    end, width = 1 + len(everyone), len(mine)
    suspicions, *told = (tuple(numbers[place:end:width]) for place in range(1, 1 + width))
    return sums.losses(numbers[end:]), numbers[0], any(suspicions), tuple(told)


def _origin(run: Run, microbatches: Sequence[Microbatch], randomness: dict[str, Any]) -> tuple[str, bool]:
    """Where this step's numbers that are not finite came from, and whether the parameters are damaged. Collective."""

    def repeat() -> float:
        restore_random_state(randomness)
        _forget_gradients(run)
        return _forward_backward(run, microbatches, forward_only=False).read().loss

    return origin(run, repeat)


def _not_finite(loss: float) -> str:
    return f"the loss is {loss}" if not math.isfinite(loss) else f"the loss is {loss:.6f}, but gradients are not finite"


def _skip_or_stop(run: Run, what: str, damaged: bool = False) -> None:
    """Say ``what`` is wrong with a step's numbers; return if the step may be left out.

    Raises:
        RuntimeFault: on every rank.
    """
    what = f"iteration {run.progress.iteration + 1}: {what}"
    run.skipped_in_a_row += 1
    if run.config.train.on_nonfinite == "stop" or damaged or run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        hint = "checkpoint.ckpt_step goes back to an older checkpoint"
        if run.config.train.on_nonfinite == "stop" and not damaged:
            hint = "train.on_nonfinite=skip leaves such a step out; " + hint
        elif not damaged:
            hint = f"{run.skipped_in_a_row} steps in a row were left out; " + hint
        raise RuntimeFault(f"{what}. The parameters were not changed. {hint}.", on_all_ranks=True)
    logger.info("%s. The step is left out", what)


def _stop_if_the_scale_is_stuck(run: Run, microbatches: Sequence[Microbatch], randomness: dict[str, Any]) -> None:
    """After an fp16 step that overflowed: return unless that goes on at a loss scale that cannot fall any further.

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
    which, hint = "the lowest", "Lower mixed_precision.min_loss_scale, or train with mixed_precision=bf16_mixed"
    if precision.loss_scale is not None:
        which, hint = "a constant one", "Lower mixed_precision.loss_scale, or leave it null to search for one"
    raise RuntimeFault(
        f"iteration {run.progress.iteration + 1}: gradients overflow at the loss scale {scale:g}, {which}, and "
        f"{run.skipped_in_a_row} steps in a row were left out; {where}. The parameters were not changed. {hint}; "
        "checkpoint.ckpt_step goes back to an older checkpoint.",
        on_all_ranks=True,
    )


def evaluate(run: Run, steps: Steps, count: int, asked_to_stop: Callable[[], bool]) -> float | None:
    """Mean loss per unmasked token over the next ``count`` global batches, without touching the model.

    ``None`` where ``asked_to_stop`` says so before one of them; it must answer the same on all ranks.
    """
    for chunk in run.model:
        chunk.eval()
        if chunk.ddp_config.overlap_param_gather:
            # Forward passes gather the weights of the modules that they call: not of the embedding's copy on the last
            # stage, by which the layers for further tokens, left out here, share it with the output layer.
            chunk.start_param_sync(force_sync=True)
    total, tokens, stopped = 0.0, 0, False
    with torch.no_grad():
        for _ in range(count):
            stopped = asked_to_stop()
            if stopped:
                break
            losses = _forward_backward(run, next(steps).microbatches, forward_only=True).read()
            total, tokens = total + losses.loss * losses.tokens, tokens + losses.tokens
    for chunk in run.model:
        chunk.train()
    return None if stopped else total / max(tokens, 1)


def _forward_backward(run: Run, microbatches: Sequence[Microbatch], forward_only: bool) -> _Sums:
    """Run the pipeline schedule; returns the same on every rank, without the losses of training alone otherwise."""
    model = run.config.model
    stages = model.virtual_pipeline_model_parallel_size
    with run.phases("data"):
        depth_tokens = [] if forward_only else _depth_tokens(run, microbatches)
    schedule = get_forward_backward_func(pp_size=model.pipeline_model_parallel_size, vp_size=stages)
    communicator = PipelineCommunicator(
        run.groups.pp, run.core_config, [_passed_on(run, each) for each in microbatches]
    )
    if run.router_losses is not None:
        run.router_losses.begin()
    timed = run.work_clock(run.core_config) if run.work_clock and not forward_only else nullcontext()
    with run.phases("forward_backward"), timed:
        reports = schedule(
            forward_step_func=partial(forward_step, mtp_weights=depth_weights(run.core_config, depth_tokens)),
            # Every virtual stage walks them at its own pace.
            data_iterator=iter(microbatches) if stages is None else [iter(microbatches) for _ in range(stages)],
            model=run.model if stages is not None else run.model[0],
            num_microbatches=len(microbatches),
            seq_length=model.seq_length,
            # Evaluation may have another one than training.
            micro_batch_size=_values_of(microbatches[0])["tokens"].shape[0],
            forward_only=forward_only,
            p2p_communicator=communicator,
            pg_collection=run.groups,
        )
        return _reduce_losses(run, reports, depth_tokens, None if forward_only else run.router_losses)


def _passed_on(run: Run, microbatch: Microbatch) -> tuple[int, int, int]:
    """The shape of what pipeline stages pass on of a microbatch."""
    rows, tokens = _values_of(microbatch)["tokens"].shape
    parts = run.groups.tp.size() if run.core_config.sequence_parallel else 1
    return tokens // parts, rows, run.core_config.hidden_size


def _values_of(microbatch: Microbatch) -> dict[str, Any]:
    return vars(microbatch) if isinstance(microbatch, PackedMicrobatch) else microbatch


def _depth_tokens(run: Run, microbatches: Sequence[Microbatch]) -> list[float]:
    """Unmasked tokens of the global batch for the main loss and for each depth of multi-token prediction."""
    depths = run.config.model.mtp_num_layers or 0
    if not depths:
        return []
    values = [_values_of(microbatch) for microbatch in microbatches]
    counts = [unmasked_tokens(each["loss_mask"], each["position_ids"], depths) for each in values]
    total = torch.stack(counts).sum(dim=0)
    dist.all_reduce(total, group=run.groups.dp_cp)
    return total.tolist()


def forward_step(
    microbatches: Iterator[Microbatch], model: Any, mtp_weights: tuple[float, ...] = ()
) -> tuple[torch.Tensor, Callable]:
    """megatron-core's forward-step contract: one microbatch through this rank's chunk."""
    values = _values_of(next(microbatches))
    output = model(
        input_ids=values["tokens"],
        position_ids=values["position_ids"],
        attention_mask=None,
        labels=values["labels"],
        loss_mask=values["loss_mask"],
        packed_seq_params=values.get("packed_seq_params"),
        # The router's losses must not count padding.
        padding_mask=values.get("padding_mask") if model.config.num_moe_experts else None,
    )
    main_loss = partial(loss_function, values["loss_mask"])
    return output, partial(_with_predictions, main_loss, mtp_weights) if mtp_weights else main_loss


def loss_function(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum of the per-token losses ``[b, s_local]`` under the mask, the number of unmasked tokens, and the report."""
    loss_mask = loss_mask.reshape(-1).float()
    total = (losses.float().reshape(-1) * loss_mask).sum()
    tokens = loss_mask.sum()
    report = torch.stack([total.detach().double(), tokens.double()])
    return total, tokens.to(torch.int), {"lm loss": report}


def _with_predictions(
    main_loss: Callable, weights: tuple[float, ...], losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """The same for losses ``[1 + depths, b, s_local]``, with each depth's sum added to the total by its weight."""
    total, tokens, report = main_loss(losses[0])
    sums = losses[1:].float().flatten(1).sum(dim=1)
    for weight, depth_sum in zip(weights, sums, strict=True):
        total = total + weight * depth_sum
    return total, tokens, report | {"mtp losses": sums.detach().double()}


def _reduce_losses(run: Run, reports: list[Batch], depth_tokens: list[float], routers: RouterLosses | None) -> _Sums:
    depths = len(depth_tokens[1:])
    total = torch.zeros(2 + depths, dtype=torch.float64, device=run.device)
    for report in reports:
        total += torch.cat([report["lm loss"], report["mtp losses"]]) if depths else report["lm loss"]
    if run.is_last_stage:
        dist.all_reduce(total, group=run.groups.dp_cp)
    if run.groups.pp.size() > 1:
        source = dist.get_process_group_ranks(run.groups.pp)[-1]
        dist.broadcast(total, src=source, group=run.groups.pp)

    def losses(numbers: Sequence[float]) -> StepLosses:
        (loss_sum, tokens, *depth_sums), of_routers = numbers[: len(total)], numbers[len(total) :]
        mtp_losses = tuple(each / max(count, 1.0) for each, count in zip(depth_sums, depth_tokens[1:], strict=True))
        router_losses = {} if routers is None else routers.means(of_routers)
        return StepLosses(loss_sum / max(tokens, 1.0), int(tokens), mtp_losses, router_losses)

    return _Sums(total if routers is None else torch.cat([total, routers.total(run.all_ranks)]), losses)
