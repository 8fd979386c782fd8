"""One training run from a checked configuration: the way down, and the last screen."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

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
from megatron_cp.data.samples.split_files import has_test_part
from megatron_cp.data.samples.streams import check_files
from megatron_cp.data.summary import TokensUsed, log_data
from megatron_cp.data.text.tokenizers import Tokenizer, build_tokenizer
from megatron_cp.launch import launcher
from megatron_cp.launch.health_monitor import HealthMonitor
from megatron_cp.mcore.packages import check_mamba_ssm
from megatron_cp.parallel.collectives import run_on_all_ranks, sum_over_ranks
from megatron_cp.parallel.device import start_distributed, stop_distributed
from megatron_cp.rules import checked
from megatron_cp.training.checkpoint.files import LATEST, latest_iteration, newer_than_latest
from megatron_cp.training.checkpoint.resume import ResumePoint, begin_with, find_start
from megatron_cp.training.checkpoint.run_lock import only_run_in
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.consistency import check_all_ranks_agree, common_resume_point
from megatron_cp.training.loop import TrainResult, evaluate_all, train
from megatron_cp.training.monitor.measuring import held_out_settings, unlike_the_run
from megatron_cp.training.monitor.metrics import Reporter, logger, start_logging, wants_live_line
from megatron_cp.training.monitor.peak import Peak, find_peak
from megatron_cp.training.monitor.sinks import writing_into
from megatron_cp.training.packed.scheduling import reported_by_all_schedules
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.signals import SignalWatch, sigterm_waits


def run(config: RunConfig, before: Callable[[RunConfig], None] | None = None) -> int:
    """Train as configured, see :func:`run_training`; returns the process's exit code."""
    return run_training(config, before).exit_code


def run_training(config: RunConfig, before: Callable[[RunConfig], None] | None = None) -> TrainResult:
    """Train as configured.

    ``before`` is called on every rank when torch.distributed runs and no process group of the run exists yet.

    Raises:
        ConfigError, DataError: a file that the run needs is missing or unusable; every rank raises the same.
        RuntimeFault: the run cannot go on; the message says where and what to do.
    """
    rank, world_size = launcher.rank(), launcher.world_size() or 1
    # The command line has checked already, without importing torch; whoever calls this from Python has not.
    config = checked(config, world_size)
    start_logging(rank, wants_live_line(config.logger.progress))
    launcher.add_variables(config.env_vars)
    # What needs no other rank is read first: a missing file ends the run before any process group exists.
    tokenizer = build_tokenizer(config.tokenizer)
    vocab_size = _vocab_size(config.model.vocab_size, tokenizer)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))  # for its checkpoints to tell
    check_files(config.dataset, tokenizer, config.tokenizer)
    if "M" in config.model.parts:
        check_mamba_ssm()
    find_start(config)
    check_save_folder(config.checkpoint.save)
    start_distributed(config.dist)
    roll, alone = HealthMonitor(timeout=60 * config.dist.distributed_timeout_minutes), False
    with ExitStack() as leaving:
        try:
            check_all_ranks_agree(asdict(config))
            # A measured run has no folder of its own: another may train in it meanwhile.
            if config.checkpoint.save and not config.train.skip_train:
                seconds = config.dist.distributed_timeout_minutes * 60
                leaving.enter_context(only_run_in(Path(config.checkpoint.save), seconds))
            if before is not None:
                roll.doing = lambda: "verification of the layout"
                before(config)
            start = common_resume_point(
                partial(find_start, config)
            )  # once more: another run may have come further meanwhile
            return _run(config, tokenizer, vocab_size, start, roll)
        except DataError:
            raise  # told to all ranks already, each of which raises it
        except BaseException as error:
            leaving.enter_context(sigterm_waits(config.train.exit_signal_handler))
            alone = is_local_failure(error)
            fault = roll.explain(error)
            if fault is None:
                raise
            raise fault from error
        finally:
            roll.close()
            stop_distributed(alone=alone)


def check_save_folder(save: str | None) -> None:
    """Make the folder that the run will write into.

    Raises:
        ConfigError: it cannot be made or written, or holds a pipe, which would wait for its reader.
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
        message, fix = f"cannot be a folder to write into: {error.strerror}", f"{NAME.checkpoint.save}=runs/another"
        raise ConfigError([Violation("", "error", NAME.checkpoint.save, message, fix, save)]) from error


def _vocab_size(known: int | None, tokenizer: Tokenizer) -> int:
    """Tokens that the model knows: as configured (``known``), else those of the tokenizer.

    Raises:
        ConfigError: the tokenizer has more, which only its files could tell (rule K11 compares what is configured).
    """
    if known is not None and known < tokenizer.vocab_size:
        message = f"the tokenizer's {tokenizer.vocab_size} tokens do not fit a vocabulary of {known}"
        fix = f"{NAME.model.vocab_size}={tokenizer.vocab_size}, or {NAME.model.vocab_size}=null"
        raise ConfigError([Violation("K11", "error", NAME.model.vocab_size, message, fix, known)])
    return known or tokenizer.vocab_size


def _run(
    config: RunConfig, tokenizer: Tokenizer, vocab_size: int, start: ResumePoint | None, roll: HealthMonitor
) -> TrainResult:
    folder = Path(config.checkpoint.save or "")
    datasets = _datasets(config, tokenizer, start)
    ready = setup(config, vocab_size)
    roll.doing = lambda: f"{ready.phases.current} of iteration {ready.progress.iteration + 1}"
    data_state, measured = None, config.train.skip_train
    if start is not None:
        weights_only = start.finetune or measured
        data_state = load_checkpoint(ready, start.root, start.iteration, weights_only).get("train")
        if measured:
            ready.progress.iteration = start.iteration
        how = "measuring" if measured else "begun with the weights of" if start.finetune else "resumed from"
        logger.info("%s iteration %d of %s", how, start.iteration, start.root)
        asked = config.checkpoint.ckpt_step
        if asked is not None and asked != start.iteration:
            logger.info(f"{NAME.checkpoint.ckpt_step}=%d is where this run began, and it has come further since", asked)
        elif measured and asked is not None and (newest := latest_iteration(start.root)) not in (asked, None):
            logger.info(f"{NAME.checkpoint.ckpt_step}=%d names it; the newest one is of iteration %d", asked, newest)
        newer = newer_than_latest(start.root)
        if asked is None and newer is not None and start.iteration == latest_iteration(start.root):
            way = begin_with(config, start.root, newer)
            logger.warning("%s/%s names iteration %d; %d is newer: %s", start.root, LATEST, start.iteration, newer, way)
    begun_at = ready.progress.iteration
    trains = not measured and ready.progress.iteration < config.train.train_iters
    if trains:  # else the folder keeps the settings that its iterations were trained with
        _write_config(config, folder)
    _announce(ready, vocab_size)
    peak: Peak | None = None
    unlike: dict[str, object] = {}
    if trains:
        given = config.logger.peak_tflops_per_device
        peak = find_peak(given, ready.core_config.params_dtype, ready.device, ready.all_ranks)
        logger.info("MFU: of a %s peak of %.4g TFLOP/s a device (%s)", peak.source, peak.tflops, peak.how)
    elif start is not None and dist.get_rank() == 0:
        samples, _ = config.evaluation_batch
        held_out = held_out_settings(config.dataset, config.tokenizer, config.validation.eval_iters, samples)
        unlike = unlike_the_run(held_out, folder, Path(start.root))
    reporter = Reporter(
        config.logger,
        config.train.train_iters,
        folder,
        ready.progress.iteration,
        writes=dist.get_rank() == 0,
        trains=trains,
        reported_by_all_schedules=reported_by_all_schedules(config.model, ready.layout),
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
        _last_words(ready, folder, outcome, begun_at)
    # Not after an error: ranks that wait in these groups would see them break before they can be told why.
    ready.close()
    return outcome


def _datasets(config: RunConfig, tokenizer: Tokenizer, start: ResumePoint | None) -> Datasets:
    train, eval_iters, eval_batch_size = config.train, config.validation.eval_iters, config.evaluation_batch[0]
    eval_samples = eval_iters * eval_batch_size
    test_samples = eval_samples if has_test_part(config.dataset) else 0
    iteration = consumed = 0
    if start is not None and not start.finetune:
        iteration, consumed = start.iteration, start.consumed_samples
    last = consumed + max(0, train.train_iters - iteration) * train.global_batch_size  # the batch size may have changed
    train_samples = 0 if train.skip_train else max(last, train.train_iters * train.global_batch_size)
    datasets = build_datasets(config.dataset, tokenizer, train_samples, eval_samples, test_samples)

    def report() -> None:
        if dist.get_rank() == 0:
            taken = TokensUsed(consumed, last, train.global_batch_size, eval_iters, eval_batch_size)
            log_data(config.dataset, config.tokenizer, datasets, tokenizer.eod, taken)

    run_on_all_ranks(report)  # a file that the first rank can no longer read ends all ranks
    return datasets


def _write_config(config: RunConfig, folder: Path) -> None:
    if dist.get_rank() == 0:
        settings = settings_of(config)
        # As used: a longer run from this file has the same schedule, which its own length no longer cuts.
        if config.scheduler.lr_warmup_fraction is None:
            settings["scheduler"]["lr_warmup_iters"] = config.scheduler.warmup_iters(config.train.train_iters)
        with writing_into(folder):
            write_text(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def _announce(ready: Run, vocab_size: int) -> None:
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


def count_parameters(ready: Run) -> int:
    """Of the whole model, each once: not what ranks hold copies of, and all ranks' experts. Collective."""
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


def _last_words(ready: Run, folder: Path, outcome: TrainResult, begun_at: int) -> None:
    if outcome.last_loss is None:
        logger.info("nothing to do: already at iteration %d", ready.progress.iteration)
        return
    logger.info(
        "iteration %d of %d: lm loss %.4f (iteration %d) -> %.4f; run folder %s",
        ready.progress.iteration,
        ready.config.train.train_iters,
        outcome.first_loss,
        begun_at + 1,
        outcome.last_loss,
        folder,
    )
