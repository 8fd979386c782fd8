"""Peak memory of the GPU that needs most. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import mul

from megatron_cp.common.host_buffers import buffer_bytes
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.job import Job, MemoryEstimate
from megatron_cp.estimate.memory.local_blocks import residual
from megatron_cp.estimate.memory.parameters import state_bytes
from megatron_cp.estimate.memory.parts import (
    LayerSettings,
    embedding_cost,
    ending_costs,
    layer_cost,
    whole_layers_again,
)
from megatron_cp.estimate.memory.peaks import Kinds, bytes_of_chunks, left_behind, peak_of_chunk
from megatron_cp.estimate.memory.platform import Platform, gpu_of
from megatron_cp.estimate.memory.stages import Chunk, backward_states, chunks_of_stages, forward_passes_before
from megatron_cp.estimate.memory.tape import ATTENTION, EXPERTS, MAMBA, MLP, RESIDUAL, PartCost
from megatron_cp.models.vocabulary import padded_vocab_size

BATCH = 8 + 8 + 8 + 4  # bytes of a token's id, label and position, and of its place in the loss mask


def memory_estimate(job: Job, where: Platform | None = None) -> MemoryEstimate:
    """Estimate peak memory of the pipeline stage with the highest use.

    ``where`` None: a GPU.
    """
    return max(stage_estimates(job, where), key=lambda found: found.total)


def stage_estimates(job: Job, where: Platform | None = None) -> Iterator[MemoryEstimate]:
    """Estimate each distinct pipeline stage; later equal stages use less."""
    where = where or gpu_of(job.model)
    settings = LayerSettings(job, where)
    seen, stages = set(), chunks_of_stages(job.model)
    for stage, chunks in enumerate(stages):
        ends = stage == 0, stage == len(stages) - 1
        if (kind := (*ends, *chunks)) not in seen:
            seen.add(kind)
            yield _stage(job, where, settings, stage, chunks)


def stage_estimate(job: Job, stage: int, where: Platform | None = None) -> MemoryEstimate:
    """Estimate peak memory of one pipeline stage."""
    where = where or gpu_of(job.model)
    settings = LayerSettings(job, where)
    return _stage(job, where, settings, stage, chunks_of_stages(job.model)[stage])


def _stage(job: Job, where: Platform, settings: LayerSettings, stage: int, chunks: Sequence[Chunk]) -> MemoryEstimate:
    model, tokens = job.model, job.tokens_per_rank
    last = stage == model.pipeline_model_parallel_size - 1
    ending: list[PartCost] = []
    costs = [
        _costs_of_chunk(settings, chunk, stage > 0 or number > 0, last and number == len(chunks) - 1)
        for number, chunk in enumerate(chunks)
    ]
    if stage == 0:
        costs[0] = [embedding_cost(settings), *costs[0]]
    if last:
        rows = padded_vocab_size(model, job.vocab_size) // model.tensor_model_parallel_size
        piece = model.cross_entropy_chunk_size
        at_once = piece if piece and piece < tokens else None
        ending = ending_costs(settings, rows, at_once)
        costs[-1] = [*costs[-1], *ending]
    stream = tokens * residual(model, settings.item)
    exchanged = dict.fromkeys((RESIDUAL, "buffers"), stream * _interleaves(model, stage, job.microbatches))
    before, waiting = exchanged, [[exchanged] * len(parts) for parts in costs]
    states = backward_states(model, stage, job.microbatches)
    if last:
        waiting[-1][len(costs[-1]) - len(ending) :] = [{}] * len(ending)
    if last and stage == 0 and (model.share_embeddings_and_output_weights or model.mtp_num_layers):
        weight = float(rows * model.hidden_size * settings.item)  # its gradient waits until the embedding's last use
        waiting[0] = [{"buffers": weight}] * (len(costs[0]) - len(ending)) + [{}] * len(ending)
    elif not last and len(chunks) == 1:  # the gradient that the next stage has sent, but in the layer that reads it
        waiting[0] = [{"buffers": stream}] * (len(costs[0]) - 1) + [{}]
    if len(chunks) == 1 and job.microbatches > states[0].under_way[0]:
        # Variables of the schedule hold tensors of the backward pass before: the gradient that came, and by the
        # output's graph the input. The gradient that is sent is among what stages exchange.
        before = {RESIDUAL: stream * (stage > 0), "buffers": stream * (not last)}
    sizes = [sum(part.size for part in parts) * tokens for parts in costs]
    left = [left_behind(parts, stage > 0, tokens) for parts in costs]
    of_state = {each: (each.chunk, each.done[each.chunk] and any(left[each.chunk])) for each in states}
    peaks = {
        (chunk, again): peak_of_chunk(costs[chunk], tokens * job.pack_load, waiting[chunk], before, again, stage > 0)
        for chunk, again in set(of_state.values())
    }
    state = max(states, key=lambda each: peaks[of_state[each]].total + bytes_of_chunks(each, sizes, left))
    chunk, under_way, peak = state.chunk, state.under_way, peaks[of_state[state]]
    inputs = [sum(buffer_bytes(int(part.host * tokens)) for part in parts if part.host) for parts in costs]
    host = max(sum(map(mul, each.under_way, inputs)) for each in states) if any(inputs) else 0
    kept: Kinds = defaultdict(float)
    for parts, microbatches in zip(costs, under_way, strict=True):
        for part in parts:
            for kind, size in part.kept.items():
                kept[kind] += size * microbatches * tokens
    kinds = kept.copy()
    for number in (number for number, done in enumerate(state.done) if done and number != chunk):
        kinds[RESIDUAL] += left[number][0]
        kinds["buffers"] += left[number][1]
    for kind, size in peak.added.items():
        kinds[kind] += size
    received, sent = _between_stages(model, stage, job.microbatches)
    kinds[RESIDUAL] += received * stream
    kinds["buffers"] += sent * stream
    if len(chunks) == 1 and stage > 0 and not last and job.microbatches > under_way[0]:
        kinds = max(_forward_again(kept, chunks[0], stream), kinds, key=lambda each: sum(each.values()))
    kinds["buffers"] += _gathered(settings, tokens, last) * model.hidden_size * settings.item
    held = state_bytes(job, stage, chunks, where.te_layers)
    kinds[ATTENTION] += _kept_angles(model) * job.positions_per_rank
    if job.lengths:  # each token's position in its document, in 8 bytes; the largest packs come first
        kinds[ATTENTION] += 8 * tokens * max(under_way)
    for number, parts in enumerate(costs):  # those of forward passes, and those that recomputation has made again
        again = len(parts) * (not state.done[number]) if number != chunk else peak.place + 1
        kinds[EXPERTS] += sum(part.routes for part in parts[: again - (number == chunk)]) * tokens
        kinds["buffers"] += sum(part.routes for part in parts[again:]) * tokens
    activations = sum(kinds.values())
    kinds["buffers"] += BATCH * tokens * job.microbatches
    kinds.update(held)
    if where.context or where.waste:
        kinds["allocator"] = where.context + where.waste * activations
    return MemoryEstimate(dict(kinds), stage, host)


def _gathered(settings: LayerSettings, tokens: int, last: bool) -> int:
    """Return the most tokens that a layer gathers at one time, in memory that stays.

    Groups of heads have memory of their own.
    """
    model, tile = settings.model, settings.tiles.dense
    if not model.sequence_parallel or model.tensor_model_parallel_size == 1:
        return 0
    if last and model.mtp_num_layers:
        return 2 * tokens
    in_pieces = model.attention_head_groups > 1 and model.layer_letters <= set("*-")
    of_layers = tile if in_pieces and tile is not None else tokens
    return max(of_layers, min(model.cross_entropy_chunk_size or tokens, tokens) if last else 0)


def _between_stages(model: ModelConfig, stage: int, microbatches: int) -> tuple[int, int]:
    """Count the residual-sized tensors that a stage holds for others at any peak.

    Returns received and sent ones.
    """
    pp = model.pipeline_model_parallel_size
    if pp == 1 or microbatches == 1:
        return 0, 0
    if (model.virtual_pipeline_model_parallel_size or 1) == 1:
        return (0, 1) if stage else (0, 0)
    virtual = model.virtual_pipeline_model_parallel_size or 1
    group, before = model.microbatch_group_size_per_vp_stage or pp, forward_passes_before(model, stage)
    if microbatches <= group:  # every backward pass that has a forward pass beside it sends a gradient
        together = max(0, microbatches * virtual - before)
        return min(1, together), max(0, together - 1)
    # Of a group larger than the pipeline, the first and the last stage get what they use only group - pp passes later.
    early = group - pp if stage in (0, pp - 1) else 0
    return (2, 3 + early) if before < group * virtual else (1, 2 + early)


def _interleaves(model: ModelConfig, stage: int, microbatches: int) -> bool:
    """Return whether a stage has a tensor that came and one to send during its passes.

    With virtual stages, and where backward passes of the second group come before the last forward pass.
    """
    pp, virtual = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    of_group = virtual * (model.microbatch_group_size_per_vp_stage or pp)
    return stage > 0 and virtual > 1 and microbatches * virtual - forward_passes_before(model, stage) > of_group


def _kept_angles(model: ModelConfig) -> float:
    """Count the bytes per position of cached rotary angles, which are float32.

    All layers share a table, and have another one where windows have their own base.
    """
    if model.multi_latent_attention:
        return model.qk_pos_emb_head_dim * 4
    if model.position_embedding_type not in ("rope", "yarn"):
        return 0.0
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    return (1 + model.has_local_rotary) * channels * model.rotary_percent * 4


def _forward_again(kept: Kinds, chunk: Chunk, stream: float) -> Kinds:
    """Return the bytes at the end of a middle stage's forward pass."""
    own = {"*": ATTENTION, "-": MLP, "E": EXPERTS, "M": MAMBA}[chunk[-1][-1]]
    found = kept.copy()
    for kind, tensors in ((own, 1), (RESIDUAL, 2), ("buffers", 2)):
        found[kind] += tensors * stream
    return found


def _costs_of_chunk(settings: LayerSettings, chunk: Chunk, received: bool, ends_model: bool) -> list[PartCost]:
    """Return the costs of a chunk's layers.

    The inputs that models/layers/recomputed_layers.py does not offload stay: one that another stage has sent
    (``received``), and the last layer's of the model (``ends_model``).
    """
    model = settings.model
    if model.recompute_granularity != "full":
        return [layer_cost(settings, part) for parts in chunk for part in parts]
    size = model.recompute_num_layers or 1
    if model.recompute_method == "uniform":
        groups, rest = [chunk[start : start + size] for start in range(0, len(chunk), size)], chunk[:0]
    else:
        groups, rest = [(parts,) for parts in chunk[:size]], chunk[size:]
    staying = {0 if received else None, len(groups) - 1 if ends_model and not rest else None}
    again = [whole_layers_again(settings, group, number in staying) for number, group in enumerate(groups)]
    return again + [layer_cost(settings, part) for parts in rest for part in parts]
