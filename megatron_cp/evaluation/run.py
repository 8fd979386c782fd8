"""Evaluate a run's checkpoint on files, from the command line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_cp.common.errors import DataError
from megatron_cp.common.terminal import say
from megatron_cp.config.names import NAME
from megatron_cp.data.samples.varlen import DocumentDataset
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.evaluation.counts import Counts, count_tokens
from megatron_cp.evaluation.files import check_files, open_sources, text_bytes
from megatron_cp.evaluation.paths import describe
from megatron_cp.evaluation.samples import EverySample
from megatron_cp.parallel.collectives import max_over_ranks, run_on_all_ranks, sum_over_ranks
from megatron_cp.report import evaluations as results
from megatron_cp.training.checkpoint.resume import ResumePoint
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.loop import TrainResult, exit_code_of
from megatron_cp.training.monitor.metrics import logger
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.signals import SignalWatch
from megatron_cp.training.train import Started, Work


def evaluation_of(paths: Sequence[str], name: str) -> Work:
    """Return the work of a run that evaluates its checkpoint on files.

    It writes ``evaluations/NAME.json`` and a picture into the run folder.
    """
    return Work(
        lambda config, tokenizer: check_files(paths, config.dataset, tokenizer, config.tokenizer),
        partial(_evaluate, paths, name),
    )


def _evaluate(paths: Sequence[str], name: str, started: Started) -> TrainResult:
    config, tokenizer, vocab_size, start, health = started
    assert start is not None  # an evaluation without a checkpoint is refused
    began = time.perf_counter()
    sources = open_sources(paths, config.dataset, tokenizer)
    samples = EverySample(sources)
    if not len(samples):
        raise DataError(f"{paths[0]}: has no document of two tokens or more. Fix: name files with longer texts")
    batches = -(-len(samples) // config.evaluation_batch[0])
    config = replace(config, validation=replace(config.validation, eval_iters=batches))
    ready = setup(config, vocab_size)
    health.doing = lambda: "evaluation"
    load_checkpoint(ready, start.root, start.iteration, True)
    ready.progress.iteration = start.iteration
    logger.info(
        "evaluating iteration %d of %s: %d samples of at most %d tokens, in %d batches",
        start.iteration,
        start.root,
        len(samples),
        config.dataset.seq_length,
        batches,
    )
    with closing(SignalWatch(config.train.exit_signal_handler)) as watch:

        def asked_to_stop() -> int:
            return int(max_over_ranks(torch.full((), watch.received, device=ready.device)))

        counts, stop = count_tokens(ready, samples, asked_to_stop)
    folder = Path(config.checkpoint.save or "")
    if stop:
        ready.close()
        return TrainResult(exit_code_of(stop, start.iteration), start.iteration, folder)
    num_bytes = _count_bytes(ready, sources, samples, tokenizer)

    def write() -> None:
        if dist.get_rank() == 0:
            found = _result(ready, start, paths, sources, samples, counts, num_bytes)
            found["seconds"] = time.perf_counter() - began
            path = results.write_result(folder, name, found)
            results.draw(path.with_suffix(".png"), found["positions"], f"{path.stem}, iteration {start.iteration}")
            results.print_result(found)
            say(f"{path}, {path.with_suffix('.png').name}")

    run_on_all_ranks(write)
    ready.close()
    return TrainResult(0, start.iteration, folder)


def _count_bytes(
    run: Run, sources: Sequence[DocumentDataset], samples: EverySample, tokenizer: Tokenizer
) -> np.ndarray | None:
    """Return the bytes of each document's text, float64. Collective.

    None if the tokenizer has no text.
    """
    found = torch.zeros(samples.num_documents, dtype=torch.float64)
    rank, ranks = run.all_ranks.rank(), run.all_ranks.size()
    for first, source in zip(samples.first_documents.tolist(), sources, strict=False):
        for document, size in text_bytes(source, tokenizer, rank, ranks):
            found[first + document] = size
    counted = found.to(run.device)
    sum_over_ranks(counted, run.all_ranks)
    return counted.cpu().numpy() if counted.any() else None


def _result(
    run: Run,
    start: ResumePoint,
    paths: Sequence[str],
    sources: Sequence[DocumentDataset],
    samples: EverySample,
    counts: Counts,
    num_bytes: np.ndarray | None,
) -> dict[str, Any]:
    model, length = run.config.model, run.config.dataset.seq_length
    files = []
    for k, (path, source) in enumerate(zip(paths, sources, strict=True)):
        own = slice(*samples.first_documents[k : k + 2].tolist())
        size = None if num_bytes is None else float(num_bytes[own].sum())
        whole = {"documents": source.num_documents, "samples": len(source)}
        files.append(describe(path) | whole | results.figures(counts.documents[own].sum(axis=0), size))
    total = None if num_bytes is None else float(num_bytes.sum())
    return {
        "format": 1,
        "checkpoint": str(Path(start.root).absolute()),
        "iteration": start.iteration,
        NAME.dataset.seq_length: length,
        "samples": "documents split into samples of at most so many labels; a sample begins without context",
        "layout": {
            "ranks": dist.get_world_size(),
            "tensor": model.tensor_model_parallel_size,
            "pipeline": model.pipeline_model_parallel_size,
            "context": model.context_parallel_size,
            "dynamic": model.dynamic_context_parallel,
        },
        **results.figures(counts.documents.sum(axis=0), total),
        "files": files,
        "positions": results.by_position(counts.positions),
        "by_document": results.by_document(counts.documents, num_bytes),
    }
