"""The training loop: step, tell, evaluate, save, stop."""

from __future__ import annotations

import gc
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_cp.data.batches import BatchIterator, slice_for_context_parallel
from megatron_cp.data.datasets import Datasets
from megatron_cp.errors import DataError
from megatron_cp.models.transformer_config import padded_vocab_size
from megatron_cp.training.batch_checks import BatchChecks, checksum_of
from megatron_cp.training.checkpoint import save_checkpoint
from megatron_cp.training.flops import training_flops
from megatron_cp.training.metrics import Reporter, StepMetrics, Stopwatch, logger
from megatron_cp.training.setup import Run
from megatron_cp.training.signals import EXIT_CODES, SignalWatch
from megatron_cp.training.step import Batch, StepResult, evaluate, train_step


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    exit_code: int
    first_loss: float | None
    last_loss: float | None


class RankBatches:
    """This rank's part of each microbatch: its data-parallel share, its context-parallel slice, on its device.

    The first microbatch of a global batch is asked for by all ranks at once: there the whole global batch is fetched
    and checked.

    Raises:
        RuntimeFault: on every rank, where the batches of any rank cannot be used.
    """

    def __init__(self, run: Run, batches: BatchIterator) -> None:
        self._run = run
        self._batches = batches
        self._checks = BatchChecks(run)
        self._window: deque[Batch] = deque()

    def state_dict(self) -> dict[str, int]:
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._batches.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._window:
            self._window.extend(self._next_global_batch())
        batch = self._window.popleft()
        return {key: value.to(self._run.device, non_blocking=True) for key, value in batch.items()}

    def _next_global_batch(self) -> list[Batch]:
        cp, checksum = self._run.groups.cp, 0
        window: list[Batch] = []
        problems: list[str] = []
        try:
            for _ in range(self._batches.num_microbatches):
                whole = next(self._batches)
                checksum = checksum_of(whole, checksum)
                window.append(slice_for_context_parallel(whole, cp.rank(), cp.size()))
                problems += self._checks.problems_of(window[-1])
        except StopIteration:
            problems.append(f"the data ends after {self._batches.consumed_samples} samples")
        except (DataError, ValueError) as error:
            problems.append(str(error))
        self._checks.agree(checksum, problems)
        return window


def batch_iterator(run: Run, dataset: torch.utils.data.Dataset, consumed_samples: int, training: bool) -> BatchIterator:
    """Microbatches of this rank from a dataset, starting after ``consumed_samples``."""
    config = run.config
    train, held_out = config.train, config.validation
    return BatchIterator(
        dataset,
        micro_batch_size=train.micro_batch_size
        if training
        else held_out.eval_micro_batch_size or train.micro_batch_size,
        global_batch_size=(
            train.global_batch_size if training else held_out.eval_global_batch_size or train.global_batch_size
        ),
        data_parallel_rank=run.groups.dp.rank(),
        data_parallel_size=run.groups.dp.size(),
        consumed_samples=consumed_samples,
        num_workers=config.dataset.num_workers,
        pin_memory=run.device.type == "cuda",
    )


def train(run: Run, datasets: Datasets, vocab_size: int, folder: Path, reporter: Reporter) -> Outcome:
    """Train from ``run.progress`` to ``train.train_iters`` or until something asks to stop; saves on the way."""
    config = run.config
    assert datasets.train is not None
    batches = batch_iterator(run, datasets.train, run.progress.consumed_samples, training=True)
    rank_batches = RankBatches(run, batches)
    watch = SignalWatch(config.train.exit_signal_handler, run.device)
    flops = config.train.global_batch_size * training_flops(
        config.model, padded_vocab_size(config, vocab_size), [config.model.seq_length or 0]
    )
    if config.train.manual_gc:
        gc.disable()
    started = time.monotonic()
    stopwatch = Stopwatch(torch.cuda.synchronize)
    first_loss = last_loss = None
    exit_code = 0
    saved_at = run.progress.iteration
    while run.progress.iteration < config.train.train_iters:
        result = train_step(run, rank_batches, batches.num_microbatches)
        _advance(run, result)
        last_loss = result.loss
        first_loss = last_loss if first_loss is None else first_loss
        reporter.step(_metrics(run, result, stopwatch.lap(), flops, batches.num_microbatches))
        iteration = run.progress.iteration
        if (
            config.train.manual_gc
            and config.train.manual_gc_interval
            and iteration % config.train.manual_gc_interval == 0
        ):
            gc.collect()
        if _due(iteration, config.validation.eval_interval):
            _evaluate(run, datasets, reporter)
        stop = watch.agreed()
        out_of_time = (
            config.train.exit_duration_in_mins is not None
            and time.monotonic() - started > 60 * config.train.exit_duration_in_mins
        )
        if _due(iteration, config.checkpoint.save_interval):
            _save(run, folder, batches)
            saved_at = iteration
        if stop or _agreed(run, out_of_time) or _due(iteration, config.train.exit_interval):
            exit_code = EXIT_CODES.get(signal.Signals(stop), 0) if stop else 0
            break
    if run.progress.iteration != saved_at:
        _save(run, folder, batches)
    if datasets.valid is not None and not exit_code and run.progress.iteration == config.train.train_iters:
        _evaluate(run, datasets, reporter)
    watch.close()
    return Outcome(exit_code, first_loss, last_loss)


def _agreed(run: Run, flag: bool) -> bool:
    """Whether any rank says so: clocks differ, and all ranks must leave the loop at the same iteration."""
    if run.config.train.exit_duration_in_mins is None:
        return False
    votes = torch.tensor(int(flag), device=run.device)
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX)
    return bool(votes.item())


def _due(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % interval == 0  # type: ignore[operator]


def _advance(run: Run, result: StepResult) -> None:
    batch = run.config.train.global_batch_size
    run.progress.iteration += 1
    run.progress.consumed_samples += batch
    run.progress.consumed_tokens += batch * (run.config.model.seq_length or 0)
    run.progress.skipped_iterations += int(result.skipped)


def _metrics(run: Run, result: StepResult, seconds: float, flops: float, num_microbatches: int) -> StepMetrics:
    devices = torch.distributed.get_world_size()
    tokens = run.config.train.global_batch_size * (run.config.model.seq_length or 0)
    return StepMetrics(
        iteration=run.progress.iteration,
        consumed_samples=run.progress.consumed_samples,
        consumed_tokens=run.progress.consumed_tokens,
        lm_loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=run.optimizer.param_groups[0]["lr"],
        step_time_s=seconds,
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_device=tokens / seconds / devices,
        tflops_per_device=flops / seconds / devices / 1e12,
        num_microbatches=num_microbatches,
        skipped=result.skipped,
    )


def _evaluate(run: Run, datasets: Datasets, reporter: Reporter) -> None:
    """Loss on the held-out sets, always on the same first ``eval_iters`` batches."""
    for name, dataset in (("validation", datasets.valid), ("test", datasets.test)):
        if dataset is None or not run.config.validation.eval_iters:
            continue
        batches = batch_iterator(run, dataset, 0, training=False)
        loss = evaluate(run, RankBatches(run, batches), batches.num_microbatches, run.config.validation.eval_iters)
        reporter.evaluation(run.progress.iteration, name, loss)


def _save(run: Run, folder: Path, batches: BatchIterator) -> None:
    path = save_checkpoint(run, folder, {"train": batches.state_dict()})
    logger.info("saved checkpoint %s", path)
