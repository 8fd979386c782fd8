"""Peak memory of the GPU that needs most. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.job import Job, MemoryEstimate
from megatron_cp.estimate.memory.activations import kept_by_layer
from megatron_cp.estimate.memory.parameters import (
    ALIGNMENT,
    Parameter,
    embedding_parameters,
    ending_parameters,
    layer_parameters,
)
from megatron_cp.estimate.memory.stages import Chunk, chunks_of_stages, microbatches_under_way
from megatron_cp.models.vocabulary import padded_vocab_size

CONTEXT = 1.0 * 2**30  # of CUDA, its libraries and NCCL, outside of PyTorch's allocator
WASTE = 0.04  # share of activations that PyTorch's allocator cannot use


def memory_estimate(job: Job) -> MemoryEstimate:
    """The pipeline stage whose GPUs need most memory, and what they need, by kind."""
    stages = chunks_of_stages(job.model)
    asked = {0, len(stages) - 1} if job.model.pipeline_model_parallel_size > 1 else {0}
    if job.model.architecture == "hybrid" or job.model.num_moe_experts is not None:
        asked = set(range(len(stages)))
    elif len(stages) > 2:
        asked.add(1)  # without the embedding
    return max((_stage(job, stage, stages[stage]) for stage in sorted(asked)), key=lambda found: found.total)


def _stage(job: Job, stage: int, chunks: list[Chunk]) -> MemoryEstimate:
    kinds = Counter(_states(job, stage, chunks))
    activations = _activations(job, stage, chunks)
    kinds.update(activations)
    kinds["allocator"] = CONTEXT + WASTE * sum(activations.values())
    return MemoryEstimate(dict(kinds), stage)


def _states(job: Job, stage: int, chunks: list[Chunk]) -> dict[str, float]:
    """Weights, gradients and optimizer."""
    model, layout = job.model, job.layout
    rows = padded_vocab_size(model, job.vocab_size)
    last = model.pipeline_model_parallel_size - 1
    counts = Counter(parts for chunk in chunks for parts in chunk)
    dense = expert = 0
    groups: list[tuple[int, Iterable[Parameter]]] = [
        (count, layer_parameters(model, parts)) for parts, count in counts.items()
    ]
    if stage == 0:
        groups.append((1, embedding_parameters(model, rows)))
    if stage == last:
        groups.append((1, ending_parameters(model, rows, first=stage == 0)))
    for count, parameters in groups:
        for each in parameters:
            elements = count * each.count * -(-each.elements // ALIGNMENT) * ALIGNMENT
            if each.expert:
                expert += elements
            else:
                dense += elements
    item = 4 if job.gemm == "fp32" else 2
    shares, expert_shares = 1, 1
    if job.optimizer.use_distributed_optimizer:
        shares = layout.dp * layout.cp
        expert_shares = max(1, layout.world_size // layout.expert_model_size)
    sharded = dense / shares + expert / expert_shares
    state = {"adam": 8, "sgd": 4 if job.optimizer.sgd_momentum else 0}.get(job.optimizer.optimizer, 4)
    return {
        "weights": (dense + expert) * item,
        "gradients": (dense + expert) * (4 if job.ddp.grad_reduce_in_fp32 else item),
        "optimizer": sharded * (state + (4 if item == 2 else 0)),
    }


def _activations(job: Job, stage: int, chunks: list[Chunk]) -> dict[str, float]:
    model, tokens = job.model, job.tokens_per_rank
    item = 4 if job.gemm == "fp32" else 2
    under_way = microbatches_under_way(model, stage, job.microbatches)
    kept: Counter[str] = Counter()
    for chunk, microbatches in zip(chunks, under_way, strict=True):
        for parts, count in Counter(chunk).items():
            for kind, size in kept_by_layer(model, parts, item).items():
                kept[f"activations: {kind}"] += size * count * microbatches * tokens
    stream = model.hidden_size * item
    split = model.tensor_model_parallel_size if model.sequence_parallel else 1
    if stage == model.pipeline_model_parallel_size - 1:
        rows = padded_vocab_size(model, job.vocab_size) / model.tensor_model_parallel_size
        at_once = min(tokens, model.cross_entropy_chunk_size or tokens)
        kept["logits"] = at_once * rows * (item + 4)
        kept["activations: norms"] += 2 * stream / split * tokens
    # A layer at work: its gradients and what recomputation makes again.
    kept["buffers"] = _working(model, chunks, item) * tokens
    return dict(kept)


def _working(model: ModelConfig, chunks: list[Chunk], item: int) -> float:
    """Bytes a token of the layer that the backward pass is in."""
    width = max(
        model.hidden_size,
        (model.ffn_hidden_size or 4 * model.hidden_size)
        * (2 if model.gated_linear_unit else 1)
        / model.tensor_model_parallel_size,
    )
    return 2 * item * (width + model.hidden_size)
