"""Parameters of a model on one rank, and bytes of weights and optimizer. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.memory.stages import Chunk
from megatron_cp.models.layers.mamba.shape import CONV_WIDTH, MambaShape
from megatron_cp.models.vocabulary import padded_vocab_size

ALIGNMENT = 64  # elements; alignment of each parameter in the distributed optimizer's buffers


@dataclass(frozen=True)
class Parameter:
    """``count`` parameters of ``elements`` elements each on one rank.

    expert: replicated over the expert data parallel group.
    matrix: trained by Muon, which supports matrices only.
    """

    elements: int
    expert: bool = False
    matrix: bool = True
    count: int = 1


def state_bytes(job: Job, stage: int, chunks: Sequence[Chunk], te_layers: bool) -> dict[str, float]:
    """Return the bytes of ``weights``, ``gradients`` and ``optimizer``."""
    distributed, item = job.optimizer.use_distributed_optimizer, 4 if job.gemm == "fp32" else 2
    elements = {False: 0, True: 0}  # by Parameter.expert
    for count, parameter in _of_stage(job, stage, chunks, te_layers):
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


def _of_stage(job: Job, stage: int, chunks: Sequence[Chunk], te_layers: bool) -> Iterator[tuple[int, Parameter]]:
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


def layer_parameters(model: ModelConfig, parts: str, te_layers: bool) -> list[Parameter]:
    """Return the parameters of a layer.

    parts: letters of attention ``*``, MLP ``-``, experts ``E`` and Mamba ``M``.
    """
    return [parameter for part in parts for parameter in _OF_PART[part](model, te_layers)]


def embedding_parameters(model: ModelConfig, rows: int) -> list[Parameter]:
    """Return the embedding parameters of the first stage.

    rows: padded vocabulary size.
    """
    found = [Parameter(rows // model.tensor_model_parallel_size * model.hidden_size, matrix=False)]
    if model.position_embedding_type == "learned_absolute":
        positions = model.max_position_embeddings or model.seq_length or 0
        found.append(Parameter(positions * model.hidden_size, matrix=False))
    return found


def ending_parameters(model: ModelConfig, rows: int, first: bool, te_layers: bool) -> list[Parameter]:
    """Return the parameters of the final norm, output layer and MTP layers.

    rows: padded vocabulary size.
    first: the last stage is also the first stage and already has the embedding.
    """
    hidden, tp = model.hidden_size, model.tensor_model_parallel_size
    found = list(_norm(model))
    vocabulary = Parameter(rows // tp * hidden, matrix=False)
    if not (model.share_embeddings_and_output_weights and first):
        found.append(vocabulary)
    depths = mtp_depths(model)
    if depths and not first and not model.share_embeddings_and_output_weights:
        found.append(vocabulary)  # embedding copy of the MTP layers
    for parts in depths:
        found += [*_norm(model) * 3, Parameter(2 * hidden * hidden // tp)]
        found += [parameter for part in parts for parameter in layer_parameters(model, part, te_layers)]
    return found


def mtp_depths(model: ModelConfig) -> list[tuple[str, ...]]:
    """Return the layer types of each MTP depth with separate weights."""
    if model.architecture == "hybrid":
        return [tuple(layers) for layers in (model.hybrid_layer_pattern or "").split("/")[1:]]
    depths = 1 if model.mtp_use_repeated_layer and model.mtp_num_layers else model.mtp_num_layers or 0
    return [model.layer_types[-1:]] * depths


def _norm(model: ModelConfig, width: int | None = None) -> list[Parameter]:
    norm = Parameter(width or model.hidden_size, matrix=False)
    return [norm] * (1 if model.normalization == "RMSNorm" else 2)


def _attention(model: ModelConfig, te_layers: bool) -> Iterator[Parameter]:
    yield from _norm(model) * (2 if model.sandwich_norm else 1)
    if model.multi_latent_attention:
        yield from _latent_attention(model, te_layers)
    else:
        yield from _own_keys(model)
    if model.softmax_type == "learnable":
        yield Parameter(model.num_attention_heads // model.tensor_model_parallel_size, matrix=False)


def _own_keys(model: ModelConfig) -> Iterator[Parameter]:
    hidden, tp, heads = model.hidden_size, model.tensor_model_parallel_size, model.num_attention_heads
    channels = model.kv_channels or hidden // heads
    gate = heads * channels if model.attention_output_gate else 0
    width = ((heads + 2 * model.kv_heads) * channels + gate) // tp
    yield Parameter(width * hidden)
    if model.add_bias_linear or model.add_qkv_bias:
        yield Parameter(width, matrix=False)
    if model.qk_layernorm:
        yield from _norm(model, channels) * 2
    yield Parameter(heads * channels // tp * hidden)
    if model.add_bias_linear:
        yield Parameter(hidden, matrix=False)


def _latent_attention(model: ModelConfig, te_layers: bool) -> Iterator[Parameter]:
    hidden, tp, heads = model.hidden_size, model.tensor_model_parallel_size, model.num_attention_heads
    queries = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim) // tp
    rank, divided = model.q_lora_rank, 1 if te_layers else tp  # TE replicates the down projections
    if rank is None:
        yield Parameter(hidden * queries)
    else:
        yield Parameter(hidden * rank // divided)
        yield Parameter(rank * queries)
    yield Parameter(hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim) // divided)
    yield Parameter(model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim) // tp)
    if model.qk_layernorm:
        yield from _norm(model, model.kv_lora_rank)
        if rank is not None:
            yield from _norm(model, rank)
    yield Parameter(heads * model.v_head_dim // tp * hidden)
    if model.add_bias_linear:
        yield Parameter(hidden, matrix=False)


def _mlp(model: ModelConfig, te_layers: bool) -> Iterator[Parameter]:
    yield from _norm(model) * (2 if model.sandwich_norm else 1)
    width = (model.ffn_hidden_size or 4 * model.hidden_size) // model.tensor_model_parallel_size
    yield from _two_matrices(model, model.hidden_size, width, biases=model.add_bias_linear)


def _two_matrices(
    model: ModelConfig, inputs: int, width: int, biases: bool, expert: bool = False
) -> Iterator[Parameter]:
    inner = width * (2 if model.gated_linear_unit else 1)
    yield Parameter(inputs * inner, expert)
    if biases:
        yield Parameter(inner, expert, matrix=False)
    yield Parameter(width * inputs, expert)
    if biases:
        yield Parameter(inputs, expert, matrix=False)


def _experts(model: ModelConfig, te_layers: bool) -> Iterator[Parameter]:
    hidden, count = model.hidden_size, model.num_moe_experts or 1
    etp, ep = model.expert_tensor_parallel_size or 1, model.expert_model_parallel_size
    apart = ep > 1 or etp != model.tensor_model_parallel_size  # separate expert data parallel group
    yield from _norm(model) * (2 if model.sandwich_norm else 1)
    yield Parameter(count * hidden)  # the router
    width = (model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * hidden) // etp
    for each in _two_matrices(model, model.moe_latent_size or hidden, width, model.add_bias_linear, apart):
        yield replace(each, count=count // ep)
    if model.moe_latent_size is not None:
        yield Parameter(hidden * model.moe_latent_size)
        yield Parameter(hidden * model.moe_latent_size)
    if model.moe_shared_expert_intermediate_size:
        shared = model.moe_shared_expert_intermediate_size // model.tensor_model_parallel_size
        yield from _two_matrices(model, hidden, shared, biases=False)
        if model.moe_shared_expert_gate:
            yield Parameter(hidden)


def _mamba(model: ModelConfig, te_layers: bool) -> Iterator[Parameter]:
    tp, whole = model.tensor_model_parallel_size, MambaShape.of(model)
    yield from _norm(model)
    yield Parameter(model.hidden_size * sum(whole.projected) // tp)
    yield Parameter(sum(whole.convolved) // tp * CONV_WIDTH)
    yield Parameter(sum(whole.convolved) // tp, matrix=False)
    yield from [Parameter(whole.heads // tp, matrix=False)] * 3  # dt_bias, A_log, D
    yield Parameter(whole.inner // tp, matrix=False)  # the gated norm
    yield Parameter(whole.inner // tp * model.hidden_size)


_OF_PART = {"*": _attention, "-": _mlp, "E": _experts, "M": _mamba}
