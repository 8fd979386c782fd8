"""Weights, gradients and optimizer state of a pipeline stage's rank. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_cp.estimate.job import Job
from megatron_cp.estimate.memory.parameters import (
    ALIGNMENT,
    Parameter,
    embedding_parameters,
    ending_parameters,
    layer_parameters,
)
from megatron_cp.estimate.memory.stages import Chunk
from megatron_cp.models.vocabulary import padded_vocab_size


def state_bytes(job: Job, stage: int, chunks: Sequence[Chunk], te_layers: bool) -> dict[str, float]:
    """Return the bytes of ``weights``, ``gradients`` and ``optimizer``."""
    distributed, item = job.optimizer.use_distributed_optimizer, 4 if job.gemm == "fp32" else 2
    elements = {False: 0, True: 0}  # by Parameter.expert
    for count, parameter in _parameters(job, stage, chunks, te_layers):
        size = parameter.elements
        if distributed:
            size = -(-size // ALIGNMENT) * ALIGNMENT
        elements[parameter.expert] += count * parameter.count * size
    shares = {False: job.layout.dp * job.layout.cp, True: job.layout.world_size // job.layout.expert_model_size}
    if distributed:
        for expert, ranks in shares.items():
            multiple = math.lcm(ranks, 2**16 if job.ddp.pad_buckets_for_high_nccl_busbw else 128)
            elements[expert] = -(-elements[expert] // multiple) * multiple
    whole = sum(elements.values())
    own = sum(size / shares[expert] for expert, size in elements.items()) if distributed else whole
    state = {"adam": 8, "sgd": 4 if job.optimizer.sgd_momentum else 0}.get(job.optimizer.optimizer, 4)
    return {
        "weights": whole * item,
        "gradients": whole * (4 if job.ddp.grad_reduce_in_fp32 else item),
        "optimizer": own * (state + (4 if item == 2 else 0)),
    }


def _parameters(job: Job, stage: int, chunks: Sequence[Chunk], te_layers: bool) -> Iterator[tuple[int, Parameter]]:
    """Yield each parameter of a stage with its number of occurrences."""
    model, rows = job.model, padded_vocab_size(job.model, job.vocab_size)
    for parts, count in Counter(parts for chunk in chunks for parts in chunk).items():
        for parameter in layer_parameters(model, parts, te_layers):
            yield count, parameter
    if stage == 0:
        for parameter in embedding_parameters(model, rows):
            yield 1, parameter
    if stage == model.pipeline_model_parallel_size - 1:
        for parameter in ending_parameters(model, rows, stage == 0, te_layers):
            yield 1, parameter
