"""Measure retrieval: whether a model finds what stands in a long text."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron_cp.common.terminal import say
from megatron_cp.data.needles.request import NeedleRequest
from megatron_cp.data.needles.scores import scores_of
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.evaluation.run import finish, measure, origin_of
from megatron_cp.report import evaluations as results
from megatron_cp.report import needles as pictures
from megatron_cp.training.held_out.samples import EverySample
from megatron_cp.training.loop import TrainResult
from megatron_cp.training.train import Started, Work


def retrieval_of(request: NeedleRequest, name: str) -> Work:
    """Return the work of a run that measures retrieval with its checkpoint.

    It writes ``evaluations/NAME.json`` and a picture into the run folder.
    """
    return Work(lambda config, tokenizer: _check(request, tokenizer), partial(_measure, request, name))


def _check(request: NeedleRequest, tokenizer: Tokenizer) -> None:
    request.source(tokenizer)


def _measure(request: NeedleRequest, name: str, started: Started) -> TrainResult:
    began = time.perf_counter()
    source = request.source(started.tokenizer)
    measured = measure(started, EverySample([source]))
    sums = measured.counts.documents

    def write(folder: Path) -> None:
        scores = scores_of(source, sums[:, 2], sums[:, 1])
        found = {
            "format": 1,
            **origin_of(measured),
            "needles": {"samples": request.samples, "haystack": request.haystack, "seed": request.seed},
            **results.figures(sums.sum(axis=0)),
            "exact": sum(score.exact for score in scores) / sum(score.samples for score in scores),
            "scores": [asdict(score) for score in scores],
            "seconds": time.perf_counter() - began,
        }
        path = results.write_result(folder, name, found)
        title = f"{path.stem}, iteration {measured.start.iteration}"
        pictures.draw(scores, title).savefig(path.with_suffix(".png"), dpi=120)
        say(pictures.as_text(scores))
        say(f"{path}, {path.with_suffix('.png').name}")

    return finish(measured, write)
