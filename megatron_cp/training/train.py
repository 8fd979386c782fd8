"""One training run from a checked configuration, from setup to the final log line."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import yaml
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_cp.common.atomic_files import write_text
from megatron_cp.common.errors import ConfigError, DataError, Violation, is_local_failure
from megatron_cp.common.input_files import special_files
from megatron_cp.config.names import NAME
from megatron_cp.config.recipes import settings_of
from megatron_cp.config.run_config import RunConfig
from megatron_cp.data.samples.datasets import Datasets, build_datasets
from megatron_cp.data.samples.epochs import iterations_of_epochs
from megatron_cp.data.samples.split_files import has_test_part
from megatron_cp.data.samples.streams import check_files
from megatron_cp.data.summary import TokensUsed, log_data
from megatron_cp.data.text.tokenizers import Tokenizer, build_tokenizer
from megatron_cp.launch import launcher
from megatron_cp.launch.health_monitor import HealthMonitor
from megatron_cp.mcore.packages import check_mamba_ssm
from megatron_cp.parallel.collectives import run_on_all_ranks, sum_over_ranks
from megatron_cp.parallel.device import start_distributed, stop_distributed
from megatron_cp.planner.scheduling import schedule_fields
from megatron_cp.rules import check_or_raise, checked
from megatron_cp.training.checkpoint.files import LATEST, latest_iteration, newer_than_latest
from megatron_cp.training.checkpoint.resume import ResumePoint, find_resume_point, resume_fix
from megatron_cp.training.checkpoint.run_lock import lock_run_folder
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.consistency import check_consistency, common_resume_point
from megatron_cp.training.held_out.evaluate import evaluate_all
from megatron_cp.training.loop import TrainResult, train
from megatron_cp.training.monitor.measuring import differences_from_run, held_out_settings
from megatron_cp.training.monitor.metrics import Reporter, logger, shows_progress_line, start_logging
from megatron_cp.training.monitor.peak import Peak, find_peak
from megatron_cp.training.monitor.sinks import writing_into
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.signals import SignalWatch, ignore_sigterm


def run(config: RunConfig, before: Callable[[RunConfig], None] | None = None) -> int:
    """Train as configured (:func:`run_training`) and return the exit code."""
    return run_training(config, before).exit_code


class Work(NamedTuple):
    """What a run does with its model.

    check: looks at the data, before the rendezvous. run: called on every rank, with process groups' backend started.
    """

    check: Callable[[RunConfig, Tokenizer], None]
    run: Callable[[Started], TrainResult]


class Started(NamedTuple):
    """A run after the rendezvous; ``start`` is the checkpoint to start from."""

    config: RunConfig
    tokenizer: Tokenizer
    vocab_size: int
    start: ResumePoint | None
    health: HealthMonitor


def run_training(
    config: RunConfig, before: Callable[[RunConfig], None] | None = None, work: Work | None = None
) -> TrainResult:
    """Train as configured; ``before`` runs on every rank before the run has groups.

    ``work`` replaces the training.

    Raises:
        ConfigError, DataError: a required file is missing or unusable. Raised on every rank.
        RuntimeFault: training failed. The message names the place and the fix.
    """
    rank, world_size = launcher.rank(), launcher.world_size() or 1
    # Python callers have not checked the configuration yet; the command line has.
    config = checked(config, world_size)
    start_logging(rank, shows_progress_line(config.logger.progress))
    launcher.add_variables(config.env_vars)
    # Read local files first, so that a missing file ends the run before process groups exist.
    tokenizer = build_tokenizer(config.tokenizer)
    vocab_size = _vocab_size(config.model.vocab_size, tokenizer)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))  # recorded in checkpoints
    work = work or Work(lambda config, tokenizer: check_files(config.dataset, tokenizer, config.tokenizer), _run)
    work.check(config, tokenizer)
    if "M" in config.model.layer_letters:
        check_mamba_ssm()
    if config.train.train_iters is not None:
        find_resume_point(config)
    check_save_folder(config.checkpoint.save)
    start_distributed(config.dist)
    health, alone = HealthMonitor(timeout=60 * config.dist.distributed_timeout_minutes), False
    with ExitStack() as stack:
        try:
            check_consistency(asdict(config))
            # An evaluation writes no checkpoints, so a training run may use the folder at the same time.
            if config.checkpoint.save and not config.train.skip_train:
                seconds = config.dist.distributed_timeout_minutes * 60
                stack.enter_context(lock_run_folder(Path(config.checkpoint.save), seconds))
            if config.train.train_epochs is not None:
                known = check_or_raise(config, world_size)
                config = config.with_iterations(iterations_of_epochs(config.train, config.dataset, tokenizer))
                # Again, now of the schedule too, which an evaluation does not use.
                for violation in () if config.train.skip_train else check_or_raise(config, world_size):
                    if violation not in known:
                        logger.warning("%s", violation)
            if before is not None:
                health.doing = lambda: "verification of the layout"
                before(config)
            start = common_resume_point(partial(find_resume_point, config))  # again, now under the lock
            return work.run(Started(config, tokenizer, vocab_size, start, health))
        except DataError:
            raise  # already raised on all ranks
        except BaseException as error:
            stack.enter_context(ignore_sigterm(config.train.exit_signal_handler))
            alone = is_local_failure(error)
            fault = health.explain(error)
            if fault is None:
                raise
            raise fault from error
        finally:
            health.close()
            stop_distributed(alone=alone)


def check_save_folder(save: str | None) -> None:
    """Create the run folder.

    Raises:
        ConfigError: the folder cannot be created or written, or holds a pipe (opening one would block).
    """
    if not save:
        return
    folder = Path(save)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
        if pipes := [path for path in special_files(folder) if path.is_fifo()]:
            raise OSError(errno.EINVAL, f"{pipes[0]} is a pipe")
    except OSError as error:
        message, fix = f"cannot be used as the run folder: {error.strerror}", f"{NAME.checkpoint.save}=runs/another"
        raise ConfigError([Violation("", "error", NAME.checkpoint.save, message, fix, save)]) from error


def _vocab_size(known: int | None, tokenizer: Tokenizer) -> int:
    """Return the configured vocabulary size ``known``, else the tokenizer's.

    Raises:
        ConfigError: the tokenizer has more tokens (rule K11 does not read the tokenizer's files).
    """
    if known is not None and known < tokenizer.vocab_size:
        message = f"the tokenizer has {tokenizer.vocab_size} tokens, more than the vocabulary of {known}"
        fix = f"{NAME.model.vocab_size}={tokenizer.vocab_size}, or {NAME.model.vocab_size}=null"
        raise ConfigError([Violation("K11", "error", NAME.model.vocab_size, message, fix, known)])
    return known or tokenizer.vocab_size


def _run(started: Started) -> TrainResult:
    config, tokenizer, vocab_size, start, health = started
    folder = Path(config.checkpoint.save or "")
    datasets = _datasets(config, tokenizer, start)
    ready = setup(config, vocab_size)
    health.doing = lambda: f"{ready.phases.current} of iteration {ready.progress.iteration + 1}"
    data_state, measured = None, config.train.skip_train
    if start is not None:
        weights_only = start.finetune or measured
        data_state = load_checkpoint(ready, start.root, start.iteration, weights_only).get("train")
        if measured:
            ready.progress.iteration = start.iteration
        how = "evaluating" if measured else "started with the weights of" if start.finetune else "resumed from"
        logger.info("%s iteration %d of %s", how, start.iteration, start.root)
        requested = config.checkpoint.ckpt_step
        if requested is not None and requested != start.iteration:
            logger.info(f"{NAME.checkpoint.ckpt_step}=%d: this run started there and has newer checkpoints", requested)
        elif measured and requested is not None and (newest := latest_iteration(start.root)) not in (requested, None):
            logger.info(
                f"{NAME.checkpoint.ckpt_step}=%d: selected; the newest checkpoint is of iteration %d", requested, newest
            )
        newer = newer_than_latest(start.root)
        if requested is None and newer is not None and start.iteration == latest_iteration(start.root):
            way = resume_fix(config, start.root, newer)
            message = "%s/%s names iteration %d, but iteration %d is newer. To use it: %s"
            logger.warning(message, start.root, LATEST, start.iteration, newer, way)
    begun_at = ready.progress.iteration
    trains = not measured and ready.progress.iteration < config.train.iterations
    if trains:  # otherwise config.yaml keeps the settings of the trained iterations
        _write_config(config, folder)
    _log_model(ready, vocab_size)
    peak: Peak | None = None
    unlike: dict[str, object] = {}
    if trains:
        given = config.logger.peak_tflops_per_device
        peak = find_peak(given, ready.core_config.params_dtype, ready.device, ready.all_ranks)
        logger.info("MFU: relative to a %s peak of %.4g TFLOP/s per device (%s)", peak.source, peak.tflops, peak.how)
    elif start is not None and dist.get_rank() == 0:
        samples, _ = config.evaluation_batch
        held_out = held_out_settings(config.dataset, config.tokenizer, config.validation, samples)
        unlike = differences_from_run(held_out, folder, Path(start.root))
    reporter = Reporter(
        config.logger,
        config.train.iterations,
        folder,
        ready.progress.iteration,
        writes=dist.get_rank() == 0,
        trains=trains,
        schedule_fields=schedule_fields(config.model, ready.layout),
        run_settings=config.as_written(),
        unlike=unlike,
        peak=peak,
    )
    with closing(SignalWatch(config.train.exit_signal_handler)) as watch, closing(reporter):
        if measured:
            outcome = TrainResult(evaluate_all(ready, datasets, reporter, watch), ready.progress.iteration, folder)
        else:
            outcome = train(ready, datasets, folder, reporter, watch, data_state)
    if dist.get_rank() == 0 and not measured:
        _log_result(ready, folder, outcome, begun_at)
    # Skipped after an error: other ranks may still use these groups until they receive the report.
    ready.close()
    return outcome


def _datasets(config: RunConfig, tokenizer: Tokenizer, start: ResumePoint | None) -> Datasets:
    train, eval_samples = config.train, config.evaluation_samples
    test_samples = eval_samples if has_test_part(config.dataset) else 0
    iteration = consumed = 0
    if start is not None and not start.finetune:
        iteration, consumed = start.iteration, start.consumed_samples
    last = consumed + max(0, train.iterations - iteration) * train.global_batch_size  # the batch size may have changed
    train_samples = 0 if train.skip_train else max(last, train.iterations * train.global_batch_size)
    datasets = build_datasets(config.dataset, tokenizer, train_samples, eval_samples, test_samples)

    def report() -> None:
        if dist.get_rank() == 0:
            taken = TokensUsed(consumed, last, train.global_batch_size, config.validation, config.evaluation_batch[0])
            log_data(config.dataset, config.tokenizer, datasets, tokenizer.eod, taken)

    run_on_all_ranks(report)  # a read error on rank 0 ends all ranks
    return datasets


def _write_config(config: RunConfig, folder: Path) -> None:
    if dist.get_rank() == 0:
        settings = settings_of(config)
        # Record the warmup in use, so that a longer run from this file keeps the same schedule.
        if config.scheduler.lr_warmup_fraction is None:
            settings["scheduler"]["lr_warmup_iters"] = config.scheduler.warmup_iters(config.train.iterations)
        with writing_into(folder):
            write_text(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def _log_model(ready: Run, vocab_size: int) -> None:
    parameters = count_parameters(ready)
    model = ready.config.model
    logger.info(
        "model: %.1fM parameters, %d layers, vocabulary %d; %d ranks: tp %d, cp %d (%s%s), pp %d, dp %d; %s; %s groups",
        parameters / 1e6,
        model.num_layers,
        vocab_size,
        dist.get_world_size(),
        model.tensor_model_parallel_size,
        model.context_parallel_size,
        model.cp_comm_type,
        f" {model.hierarchical_context_parallel_sizes}" if model.hierarchical_context_parallel_sizes else "",
        model.pipeline_model_parallel_size,
        ready.groups.dp.size(),
        str(ready.core_config.params_dtype).removeprefix("torch."),
        "decentralized" if ready.config.dist.use_decentralized_pg else "MPU",
    )
    if model.offload_layer_inputs:
        on_gpu = ready.device.type == "cuda"
        how = "go to pinned host memory" if on_gpu else "stay: a CPU has no other memory, only the bytes are counted"
        logger.info(f"{NAME.model.offload_layer_inputs}=true: inputs of recomputed layers {how}")


def count_parameters(ready: Run) -> int:
    """Count each parameter of the whole model once, over all ranks. Collective."""
    groups = ready.groups
    counts = torch.zeros(2, dtype=torch.int64, device=ready.device)
    for parameter in (parameter for chunk in ready.model for parameter in chunk.parameters()):
        expert = not getattr(parameter, "allreduce", True)
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
            parameter, groups.tp, groups.expt_tp
        ):
            counts[int(expert)] += parameter.numel()
    dense, experts = counts.split(1)
    return int(sum_over_ranks(dense, groups.mp) + sum_over_ranks(experts, groups.tp_ep_pp))


def _log_result(ready: Run, folder: Path, outcome: TrainResult, begun_at: int) -> None:
    if outcome.last_loss is None:
        logger.info("nothing to do: already at iteration %d", ready.progress.iteration)
        return
    logger.info(
        "iteration %d of %d: lm loss %.4f (iteration %d) -> %.4f; run folder %s",
        ready.progress.iteration,
        ready.config.train.iterations,
        outcome.first_loss,
        begun_at + 1,
        outcome.last_loss,
        folder,
    )
