"""Measure the loss on validation and test data."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import cast

import torch
from torch.utils.data import Dataset

from megatron_cp.data.samples.datasets import Datasets
from megatron_cp.data.samples.streams import Stream
from megatron_cp.parallel.collectives import max_over_ranks
from megatron_cp.training.forward_backward import forward_backward
from megatron_cp.training.held_out.counts import count_tokens
from megatron_cp.training.held_out.samples import CountedSource, EverySample
from megatron_cp.training.monitor.metrics import Reporter, logger
from megatron_cp.training.monitor.step_metrics import HeldOutLoss
from megatron_cp.training.open_steps import open_steps
from megatron_cp.training.setup import Run
from megatron_cp.training.signals import SignalWatch, exit_code_of


def evaluate_all(run: Run, datasets: Datasets, reporter: Reporter, watch: SignalWatch, again: bool = True) -> int:
    """Evaluate all held-out data and return the exit code.

    With ``again=False`` the validation loss is up to date and only test data are evaluated.
    """
    stop = evaluate_part(run, "validation", datasets.valid, reporter, watch) if again else 0
    stop = stop or evaluate_part(run, "test", datasets.test, reporter, watch)
    return exit_code_of(stop, run.progress.iteration)


def evaluate_part(run: Run, name: str, dataset: Dataset | Stream | None, reporter: Reporter, watch: SignalWatch) -> int:
    """Log the loss of a held-out set, if any.

    Evaluates the first ``eval_iters`` batches, or with ``full_validation`` each sample once.

    Returns:
        The signal that asked any rank to stop meanwhile, else 0. After a signal no loss is logged.
    """
    if dataset is None:
        return 0
    began = time.perf_counter()

    def asked_to_stop() -> int:
        return int(max_over_ranks(torch.full((), watch.read(), device=run.device)))

    with run.phases("evaluation"):
        if run.config.validation.full_validation:
            loss, stop = _every_sample(run, cast(Stream, dataset), asked_to_stop)
        else:
            loss, stop = _batches(run, dataset, asked_to_stop)
    if not stop:
        if not loss.loss_tokens and reporter.writes:
            logger.warning("%s: no token of the evaluated samples is in the loss, so there is no loss", name)
        reporter.evaluation(run.progress.iteration, name, loss, time.perf_counter() - began)
    return stop


def _every_sample(run: Run, stream: Stream, asked_to_stop: Callable[[], int]) -> tuple[HeldOutLoss, int]:
    """Evaluate each sample once.

    A document that is split into several samples counts as one.
    """
    sources = cast("list[CountedSource]", stream.one_epoch())
    counts, stop = count_tokens(run, EverySample(sources), asked_to_stop)
    loss, tokens, _ = counts.documents[counts.documents[:, 1] > 0].T
    per_token = float(loss.sum() / tokens.sum()) if len(tokens) else float("nan")
    per_sample = float((loss / tokens).mean()) if len(tokens) else float("nan")
    return HeldOutLoss(per_token, int(tokens.sum()), per_sample, len(tokens)), stop


def _batches(run: Run, dataset: Dataset | Stream, asked_to_stop: Callable[[], int]) -> tuple[HeldOutLoss, int]:
    """Evaluate the first ``eval_iters`` global batches."""
    for chunk in run.model:
        chunk.eval()
        if chunk.ddp_config.overlap_param_gather:
            # Forward passes gather the weights of the modules they call. Evaluation skips the MTP layers, so the
            # embedding copy on the last stage, which the output layer shares, needs this explicit gather.
            chunk.start_param_sync(force_sync=True)
    total, tokens, stop = 0.0, 0, 0
    with torch.no_grad(), closing(open_steps(run, dataset, 0, training=False)) as steps:
        for _ in range(run.config.validation.eval_iters):
            if stop := asked_to_stop():
                break
            losses = forward_backward(run, next(steps).microbatches, forward_only=True).read()
            total, tokens = total + losses.loss * losses.tokens, tokens + losses.tokens
    for chunk in run.model:
        chunk.train()
    return HeldOutLoss(total / tokens if tokens else float("nan"), tokens), stop
