"""The training loop: step, log, evaluate, save, stop."""

from __future__ import annotations

import gc
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_cp.common.jsonl_log import METRICS, read_lines
from megatron_cp.data.samples.datasets import Datasets
from megatron_cp.estimate.flops import training_flops
from megatron_cp.training.batches import Step, Steps
from megatron_cp.training.checkpoint.saver import CheckpointSaver, SaveResult
from megatron_cp.training.held_out.evaluate import evaluate_all, evaluate_part
from megatron_cp.training.monitor.loss_spikes import SpikeWatch
from megatron_cp.training.monitor.metrics import Reporter, logger
from megatron_cp.training.monitor.phases import PHASES, peak_memory_bytes
from megatron_cp.training.monitor.profiling import Profiler
from megatron_cp.training.monitor.step_metrics import StepMetrics
from megatron_cp.training.monitor.step_report import StepReport
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.optimizer import ScheduledValues, scheduled_values
from megatron_cp.training.setup import Run
from megatron_cp.training.signals import SignalWatch, exit_code_of
from megatron_cp.training.step import StepResult, train_step


@dataclass(frozen=True)
class TrainResult:
    """Exit code, last iteration and losses of a run; losses are None without a step."""

    exit_code: int
    iteration: int
    folder: Path
    first_loss: float | None = None
    last_loss: float | None = None

    def metrics(self) -> list[dict[str, Any]]:
        """Read all lines of ``metrics.jsonl``, including lines of earlier starts."""
        return read_lines(self.folder / METRICS)


def train(
    run: Run,
    datasets: Datasets,
    folder: Path,
    reporter: Reporter,
    watch: SignalWatch,
    data_state: dict[str, Any] | None = None,
) -> TrainResult:
    """Train from ``run.progress`` to ``train.train_iters`` or a stop request.

    Saves checkpoints on the way. ``data_state`` is the data position of the checkpoint that the run resumes from.
    """
    assert datasets.train is not None
    config, progress = run.config, run.progress
    if config.train.manual_gc:
        gc.disable()
    started = time.monotonic()
    limit = config.train.exit_duration_in_mins
    spikes = SpikeWatch(config.train.loss_spike_factor)
    first_loss = last_loss = None
    exit_code = 0
    saved_at = logged_at = progress.iteration
    evaluated_at = None

    def report() -> StepReport:
        out_of_time = limit is not None and time.monotonic() - started > 60 * limit
        seconds = run.phases.read() if reporter.is_due(progress.iteration + 1) else {}
        memory = peak_memory_bytes(run.device)
        return StepReport(watch.read(), out_of_time, saver.writing, memory, dict.fromkeys(PHASES, 0.0) | seconds)

    with (
        closing(open_steps(run, datasets.train, progress.consumed_samples, training=True)) as steps,
        closing(CheckpointSaver(run, folder)) as saver,
        closing(Profiler(config.profiling, folder, torch.distributed.get_rank(), run.phases)) as profiler,
    ):
        if data_state is not None:
            steps.load_state_dict(data_state)
        first_look = config.validation.eval_on_start and progress.iteration == 0
        if first_look and (stop := evaluate_part(run, "validation", datasets.valid, reporter, watch)):
            return TrainResult(exit_code_of(stop, 0), 0, folder)
        run.phases.forget()  # time before the first step belongs to no step
        while progress.iteration < config.train.iterations:
            with profiler.step(progress.iteration):
                began = time.perf_counter()
                with run.phases("data"):
                    step = next(steps)
                scheduled = scheduled_values(run.optimizer, run.core_config.fp16)
                result = train_step(run, step.microbatches, report)
                seconds = time.perf_counter() - began  # reading loss and norm has synchronized with the GPU
                _advance(run, step, result)
            steps.observe()
            last_loss = result.loss
            first_loss = last_loss if first_loss is None else first_loss
            iteration = progress.iteration
            interval = None
            if reporter.is_due(iteration):
                interval = result.report.interval(iteration - logged_at)
                logged_at = iteration
            spike = spikes.is_spike(result.loss)
            if spike:
                logger.info("loss spike at iteration %d: %.6f, median %.6f", iteration, result.loss, spikes.usual)
            if reporter.writes:
                reporter.step(_metrics(run, step, scheduled, result, seconds, spike), interval)
                if step.plan is not None:
                    reporter.schedule(iteration, step.plan)
            if config.train.manual_gc and _due(iteration, config.train.manual_gc_interval):
                gc.collect()
            if not result.report.saving:
                _report(run, saver.finish(), reporter)
            if _due(iteration, config.checkpoint.save_interval):
                _save(run, saver, steps, reporter)
                saved_at = iteration
            stop = result.report.signal
            if not stop and _due(
                iteration, config.validation.eval_interval
            ):  # after the save, because evaluation may take long
                stop = evaluate_part(run, "validation", datasets.valid, reporter, watch)
                evaluated_at = iteration
            if stop or result.report.out_of_time or _due(iteration, config.train.exit_interval):
                exit_code = exit_code_of(stop, iteration)
                break
        if progress.iteration != saved_at:
            _save(run, saver, steps, reporter)
        _report(run, saver.finish(), reporter)
        if not exit_code and progress.iteration == config.train.iterations:
            exit_code = evaluate_all(run, datasets, reporter, watch, again=evaluated_at != progress.iteration)
    return TrainResult(exit_code, progress.iteration, Path(config.checkpoint.save or ""), first_loss, last_loss)


def _due(iteration: int, interval: int | None) -> bool:
    return bool(interval and iteration % interval == 0)


def _advance(run: Run, step: Step, result: StepResult) -> None:
    run.progress.iteration += 1
    run.progress.consumed_samples += len(step.lengths)
    run.progress.consumed_tokens += step.tokens
    run.progress.consumed_loss_tokens += result.tokens
    run.progress.skipped_iterations += int(result.skipped)


def _metrics(
    run: Run, step: Step, scheduled: ScheduledValues, result: StepResult, seconds: float, spike: bool
) -> StepMetrics:
    devices, plan = torch.distributed.get_world_size(), step.plan
    flops = training_flops(run.config.model, run.vocab_rows, step.lengths)
    packing: dict[str, Any] = {}
    if plan is not None:
        packing = {
            "schedule_time_s": plan.exposed_seconds,
            "imbalance": plan.imbalance,
            "padding_fraction": plan.padding_fraction,
            "cp_sizes": plan.cp_sizes,
        }
    return StepMetrics(
        iteration=run.progress.iteration,
        consumed_samples=run.progress.consumed_samples,
        consumed_tokens=run.progress.consumed_tokens,
        consumed_loss_tokens=run.progress.consumed_loss_tokens,
        loss_tokens=result.tokens,
        lm_loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=scheduled.learning_rate,
        weight_decay=scheduled.weight_decay,
        step_time_s=seconds,
        tokens_per_s=step.tokens / seconds,
        tokens_per_s_per_device=step.tokens / seconds / devices,
        tflops_per_device=flops / seconds / devices / 1e12,
        num_microbatches=step.num_microbatches,
        skipped=result.skipped,
        loss_scale=float(scheduled.loss_scale),
        mtp_losses=result.mtp_losses,
        router_losses=result.router_losses,
        loss_spike=spike,
        max_attention_logit=result.max_attention_logit,
        **packing,
    )


def _save(run: Run, saver: CheckpointSaver, steps: Steps, reporter: Reporter) -> None:
    with run.phases("checkpoint"):
        _report(run, saver.finish(), reporter)  # a save that still runs in the background
        saved = saver.save({"train": steps.state_dict()})
    _report(run, saved, reporter)


def _report(run: Run, saved: SaveResult | None, reporter: Reporter) -> None:
    if saved is None:
        return
    reporter.saved(run.progress.iteration, saved.paused)
    logger.info(
        "saved checkpoint %s (training paused %.2f s, complete after %.2f s)",
        saved.folder,
        saved.paused,
        saved.taken,
    )
