"""Evaluate a run's checkpoint on files, from the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_cp.common.terminal import say
from megatron_cp.config.names import NAME
from megatron_cp.data.samples.varlen import DocumentDataset
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.evaluation.files import check_files, open_sources, text_bytes
from megatron_cp.evaluation.paths import describe
from megatron_cp.parallel.collectives import max_over_ranks, run_on_all_ranks, sum_over_ranks
from megatron_cp.report import evaluations as results
from megatron_cp.training.checkpoint.resume import ResumePoint
from megatron_cp.training.checkpoint.saver import load_checkpoint
from megatron_cp.training.held_out.counts import Counts, batches_of, count_tokens
from megatron_cp.training.held_out.samples import EverySample
from megatron_cp.training.loop import TrainResult
from megatron_cp.training.monitor.metrics import logger
from megatron_cp.training.setup import Run, setup
from megatron_cp.training.signals import SignalWatch, exit_code_of
from megatron_cp.training.train import Started, Work


def evaluation_of(paths: Sequence[str], name: str) -> Work:
    """Return the work of a run that evaluates its checkpoint on files.

    It writes ``evaluations/NAME.json`` and a picture into the run folder.
    """
    return Work(
        lambda config, tokenizer: check_files(paths, config.dataset, tokenizer, config.tokenizer),
        partial(_evaluate, paths, name),
    )


class Measured(NamedTuple):
    """A ready run and its counts; ``stop`` is the signal that ended them, else 0."""

    run: Run
    start: ResumePoint
    counts: Counts
    stop: int


def measure(started: Started, samples: EverySample) -> Measured:
    """Load the checkpoint and count every sample. Collective."""
    config, _, vocab_size, start, health = started
    assert start is not None  # an evaluation without a checkpoint is refused
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
        batches_of(ready, samples),
    )
    with closing(SignalWatch(config.train.exit_signal_handler)) as watch:

        def asked_to_stop() -> int:
            return int(max_over_ranks(torch.full((), watch.read(), device=ready.device)))

        counts, stop = count_tokens(ready, samples, asked_to_stop)
    return Measured(ready, start, counts, stop)


def finish(measured: Measured, write: Callable[[Path], None]) -> TrainResult:
    """Write the results into the run folder, on the first rank. Collective."""
    run, start, folder = measured.run, measured.start, Path(measured.run.config.checkpoint.save or "")
    if not measured.stop:
        run_on_all_ranks(lambda: write(folder) if dist.get_rank() == 0 else None)
    run.close()
    code = exit_code_of(measured.stop, start.iteration)
    return TrainResult(code, start.iteration, folder)


def origin_of(measured: Measured) -> dict[str, Any]:
    """Return the checkpoint and the layout of an evaluation."""
    run, model = measured.run, measured.run.config.model
    return {
        "checkpoint": str(Path(measured.start.root).absolute()),
        "iteration": measured.start.iteration,
        NAME.dataset.seq_length: run.config.dataset.seq_length,
        "layout": {
            "ranks": dist.get_world_size(),
            "tensor": model.tensor_model_parallel_size,
            "pipeline": model.pipeline_model_parallel_size,
            "context": model.context_parallel_size,
            "dynamic": model.dynamic_context_parallel,
        },
    }


def _evaluate(paths: Sequence[str], name: str, started: Started) -> TrainResult:
    began = time.perf_counter()
    tokenizer = started.tokenizer
    sources = open_sources(paths, started.config.dataset, tokenizer)
    samples = EverySample(sources)
    measured = measure(started, samples)
    num_bytes = None if measured.stop else _count_bytes(measured.run, sources, samples, tokenizer)

    def write(folder: Path) -> None:
        found = _result(measured, paths, sources, samples, num_bytes)
        found["seconds"] = time.perf_counter() - began
        path = results.write_result(folder, name, found)
        results.draw(path.with_suffix(".png"), found["positions"], f"{path.stem}, iteration {measured.start.iteration}")
        results.print_result(found)
        say(f"{path}, {path.with_suffix('.png').name}")

    return finish(measured, write)


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
    measured: Measured,
    paths: Sequence[str],
    sources: Sequence[DocumentDataset],
    samples: EverySample,
    num_bytes: np.ndarray | None,
) -> dict[str, Any]:
    counts, files = measured.counts, []
    for k, (path, source) in enumerate(zip(paths, sources, strict=True)):
        own = slice(*samples.first_documents[k : k + 2].tolist())
        size = None if num_bytes is None else float(num_bytes[own].sum())
        whole = {"documents": source.num_documents, "samples": len(source)}
        files.append(describe(path) | whole | results.figures(counts.documents[own].sum(axis=0), size))
    total = None if num_bytes is None else float(num_bytes.sum())
    return {
        "format": 1,
        **origin_of(measured),
        "samples": "documents split into samples of at most so many labels; a sample begins without context",
        **results.figures(counts.documents.sum(axis=0), total),
        "files": files,
        "positions": results.by_position(counts.positions),
        "by_document": results.by_document(counts.documents, num_bytes),
    }
