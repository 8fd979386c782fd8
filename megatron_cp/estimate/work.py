"""Work of a layer and of the loss on one rank, for one microbatch.

Each has forward, backward and recomputed work. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megatron_cp.attention.heads import sharing_groups
from megatron_cp.attention.transports.registry import HEADS, RING, Transport, known_transports
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.flops import head_dims
from megatron_cp.estimate.rank import NOTHING, Passes, Rank, Work
from megatron_cp.models.layers.mamba.shape import MambaShape

EXPERT_KERNELS = 200  # kernel launches of routing and sorting, per layer and pass
MERGED = 12  # bytes moved per output element to merge the result of a ring step


def work_of(model: ModelConfig, rank: Rank, part: str) -> Passes:
    """Return the work of one part of a layer.

    part: attention ``*``, MLP ``-``, experts ``E`` or Mamba ``M``.
    """
    return _OF_PART[part](model, rank)


def _around(model: ModelConfig, rank: Rank, backward: bool) -> Work:
    """Return the work of norm, residual addition and tensor parallel messages."""
    hidden = model.hidden_size
    around = Work(elementwise=rank.moved((6 if backward else 5) * rank.tokens * hidden / rank.split), kernels=4)
    # Sequence parallelism gathers the input again for the weight gradients.
    return around.plus(rank.of_tensor_parallel(hidden, 3 if backward and rank.split > 1 else 2))


def _recomputed(model: ModelConfig, modules: Mapping[str, Work], layer: Work) -> Work:
    if model.recompute_granularity == "full":
        return layer
    again = NOTHING
    if model.recompute_granularity == "selective":
        for module in model.recompute_modules or ["core_attn"]:
            again = again.plus(modules.get(module, NOTHING))
    return again


def _norm_again(model: ModelConfig, rank: Rank) -> Work:
    return Work(elementwise=rank.moved(2 * rank.tokens * model.hidden_size / rank.split), kernels=1)


def _attention(model: ModelConfig, rank: Rank) -> Passes:
    hidden, tokens, heads = model.hidden_size, rank.tokens, model.num_attention_heads / rank.tp
    qk, v = head_dims(model)
    groups = max(1.0, model.kv_heads / rank.tp)
    if model.multi_latent_attention:
        latent, queries = model.kv_lora_rank, model.q_lora_rank
        up = [(tokens, float(latent), heads * (model.qk_head_dim + v))]
        down = [(tokens, float(hidden), float(latent + model.qk_pos_emb_head_dim)), (tokens, heads * v, float(hidden))]
        if queries:
            down.append((tokens, float(hidden), float(queries)))
        up.append((tokens, float(queries or hidden), heads * qk))
        shapes = [*down, *up]
    else:
        up = []
        shapes = [(tokens, float(hidden), heads * qk + groups * (qk + v)), (tokens, heads * v, float(hidden))]
    weights = sum(k * n for _, k, n in shapes)
    if (sharing := sharing_groups(model.attention_head_groups, model.kv_heads // rank.tp)) > 1:
        groups *= sharing  # each projects and exchanges its key/value head
        shapes[0] = (tokens, float(hidden), heads * qk + groups * (qk + v))
    rotated = Work(elementwise=rank.moved(2 * tokens * (heads + groups) * qk), kernels=2)
    core, core_back = (attention_core(model, rank, heads, groups, back) for back in (False, True))
    forward = rank.products(*shapes).plus(rotated).plus(core).plus(_around(model, rank, False))
    backward = rank.products(*shapes, backward=True).plus(rotated).plus(core_back).plus(_around(model, rank, True))
    modules = {"core_attn": core, "layernorm": _norm_again(model, rank), "mla_up_proj": rank.products(*up)}
    if (count := model.attention_head_groups) > 1:
        # The backward pass projects and rotates again. Each group starts kernels of its own, and normalizes the input
        # once forward and twice backward, which the norm's own backward pass does once more. Under sequence parallelism
        # each gathers the input once forward and twice backward, the output's gradient, and reduces the input's.
        projected = rank.products(shapes[0]).plus(rotated)
        more = sum(each.kernels for each in (projected, core)) * (count - 1)
        norm = _norm_again(model, rank)
        forward = forward.plus(NOTHING._replace(kernels=more)).plus(norm, count - 1)
        backward = backward.plus(projected).plus(NOTHING._replace(kernels=3 * more)).plus(norm, 2 * count + 1)
        if rank.split > 1:
            forward = forward.plus(rank.of_tensor_parallel(hidden, count - 1))
            backward = backward.plus(rank.of_tensor_parallel(hidden, 4 * count - 3))
        modules["core_attn"] = NOTHING  # its inputs are not kept
    again = _recomputed(model, modules, forward)
    return Passes(forward, backward, again, weights)


def attention_core(model: ModelConfig, rank: Rank, heads: float, groups: float, backward: bool) -> Work:
    """Return the work of core attention and of the context parallel exchange.

    heads, groups: query and key-value heads on this tensor parallel rank.
    """
    device, (qk, v) = rank.device, head_dims(model)
    scores = rank.square * heads / rank.cp * device.score_bytes * (1.5 if backward else 1)
    total = NOTHING
    transports = known_transports(model.transports) or (RING,)
    for transport in transports:
        rings = _ring_size(rank, transport)
        seconds = _kernels(model, rank, heads, rings, backward)
        merged = MERGED * (rings - 1) * rank.tokens * heads * v / device.memory_bandwidth if transport.hops else 0.0
        sent = _heads_exchanged(model, rank, transport, heads * (qk + v), groups * (qk + v), seconds, backward)
        sent += _keys_sent(rank, transport, groups * (qk + v), seconds, backward)
        if backward and model.attention_head_groups > 1:  # again, because only the output was kept
            forward = _kernels(model, rank, heads, rings, backward=False)
            sent += _keys_sent(rank, transport, groups * (qk + v), forward, backward=False)
        work = Work(
            attention=seconds,
            elementwise=scores / device.memory_bandwidth + merged,
            cp=sent,
            kernels=(2 if backward else 1) * rings * (4 if device.score_bytes else 1),
        )
        total = total.plus(work, 1 / len(transports))
    return total


def _kernels(model: ModelConfig, rank: Rank, heads: float, rings: int, backward: bool) -> float:
    """Return the seconds of the attention kernels."""
    device, pairs = rank.device, rank.square if rank.device.score_bytes else rank.pairs
    flops = 2 * sum(head_dims(model)) * heads * (2.5 if backward else 1) * pairs / rank.cp
    return flops / device.attention_flops[backward] * (1 + device.attention_half / max(1.0, rank.longest / rings))


def _ring_size(rank: Rank, transport: Transport) -> int:
    if transport.hierarchical:
        return rank.levels[-1] if rank.levels else rank.cp
    return 1 if transport.exchanges_heads else rank.cp


def _heads_exchanged(
    model: ModelConfig, rank: Rank, transport: Transport, queries: float, keys: float, attention: float, backward: bool
) -> float:
    """Estimate exposed seconds of exchanges of sequence for heads.

    queries: elements per token of queries and outputs.
    keys: elements per token of keys and values.
    attention: seconds of the attention kernels.
    """
    of_heads, groups = rank.cp // _ring_size(rank, transport), model.attention_head_groups
    if HEADS not in transport.levels or of_heads < 2:
        return 0.0
    # Queries, keys and values; then outputs. The backward pass of groups has those and their gradients.
    times = 2 if backward and groups > 1 else 1
    there, back = (
        times * rank.links.exchange(of_heads, rank.tp, rank.tokens * elements * rank.item / groups, tensors)
        for elements, tensors in ((queries / 2 + keys, 3), (queries / 2, 1))
    )
    hidden = 0.0
    if model.overlap_head_groups and groups > 1:
        # The next group is on its way there while one is computed, and the one before it on its way back.
        for beside in (there, *[there + back] * (groups - 2), back):
            hidden += rank.device.overlap["cp"] * min(attention / groups, beside)
    return groups * (there + back) - hidden


def _keys_sent(rank: Rank, transport: Transport, keys: float, attention: float, backward: bool) -> float:
    """Estimate exposed seconds of keys and values that come to queries.

    Arguments as above; the kernels overlap messages of a ring.
    """
    links, ring = rank.links, _ring_size(rank, transport)
    if ring == 1:
        return 0.0
    stride, held = rank.tp * (rank.cp // ring), rank.tokens * keys * rank.item * (2 if backward else 1)
    if transport.hops or transport.hierarchical:
        hidden = rank.device.overlap["cp"] * attention * (ring - 1) / ring
        return max(rank.device.intra_latency, (ring - 1) * links.hop(ring, stride, held) - hidden)
    return links.gather(ring, stride, held * ring)


def _activation(model: ModelConfig, rank: Rank, elements: float, backward: bool) -> Work:
    """Return the work of the activation function and gate on ``elements`` outputs."""
    each = (5 if backward else 3) if model.gated_linear_unit else (3 if backward else 2)
    if model.activation_func_clamp_value is not None or model.glu_linear_offset:
        each *= 4  # no kernel fuses these
    return Work(elementwise=rank.moved(each * elements), kernels=1)


def _pieces(model: ModelConfig, rows: float) -> int:
    """Return the number of tiles of ``rows`` (``mlp_chunk_size``)."""
    return math.ceil(rows / model.mlp_chunk_size) if model.mlp_chunk_size else 1


def _in_tiles(model: ModelConfig, forward: Work, pieces: int, read: bool = False) -> tuple[Work, Work]:
    """Return the work of tiles computed again, and what a recomputed layer omits.

    read: its own backward pass reads the MLP's output, as other layers of a segment do (models/layers/mlp/tiles.py).
    """
    if pieces == 1:
        return NOTHING, NOTHING
    full = model.recompute_granularity == "full"
    segment = model.recompute_num_layers or 1 if full and model.recompute_method == "uniform" else 1
    return forward, NOTHING.plus(forward, 0 if read or (full and model.sandwich_norm) else 1 / segment)


def _mlp_of(model: ModelConfig, rank: Rank, width: float) -> tuple[Work, Work, float]:
    """Return forward work, backward work and parameter count of an MLP."""
    hidden, split, pieces = float(model.hidden_size), width / rank.tp, _pieces(model, rank.tokens)
    rows = rank.tokens / pieces
    shapes = [(rows, hidden, split * (2 if model.gated_linear_unit else 1)), (rows, split, hidden)]
    passes = [
        NOTHING.plus(rank.products(*shapes, backward=back).plus(_activation(model, rank, rows * split, back)), pieces)
        for back in (False, True)
    ]
    return passes[0], passes[1], sum(k * n for _, k, n in shapes)


def _mlp(model: ModelConfig, rank: Rank) -> Passes:
    forward, backward, weights = _mlp_of(model, rank, model.ffn_hidden_size or 4 * model.hidden_size)
    whole, pieces = forward.plus(_around(model, rank, False)), _pieces(model, rank.tokens)
    tiles, left_out = _in_tiles(model, forward, pieces)
    modules = {"mlp": forward if pieces == 1 else NOTHING, "layernorm": _norm_again(model, rank)}
    again = _recomputed(model, modules, whole.plus(left_out, -1))
    return Passes(whole, backward.plus(tiles).plus(_around(model, rank, True)), again, weights)


def _experts(model: ModelConfig, rank: Rank) -> Passes:
    hidden = float(model.moe_latent_size or model.hidden_size)
    experts, topk = model.num_moe_experts or 1, model.moe_router_topk
    width = (model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size) / rank.etp
    local = experts / rank.ep
    arrived = rank.tokens / rank.tp * topk * rank.etp  # tokens per rank under a balanced router
    pieces = _pieces(model, arrived / local)
    rows = arrived / local / pieces
    shapes = [(rows, hidden, width * (2 if model.gated_linear_unit else 1)), (rows, width, hidden)]
    weights = local * sum(k * n for _, k, n in shapes)
    sent = rank.tokens / rank.tp * topk * hidden * rank.item
    exchanged = 2 * rank.links.exchange(rank.ep, rank.etp, sent) * (1 - rank.device.overlap["ep"])
    exchanged += 2 * rank.links.gather(rank.etp, 1, sent * rank.etp)
    passes, active, grouped = [], [], []
    for back in (False, True):
        sorting = Work(elementwise=rank.moved(8 * arrived * hidden), ep=exchanged, kernels=EXPERT_KERNELS)
        chosen = rank.products((rank.tokens / rank.split, float(model.hidden_size), float(experts)), backward=back)
        each = rank.products(*shapes, count=local * pieces, backward=back)
        kernels = 4 * _pieces(model, arrived) if local > 1 else each.kernels  # one for all local experts
        active.append(_activation(model, rank, arrived * width, back))
        grouped.append(each._replace(kernels=kernels).plus(active[-1]))
        passes.append(grouped[-1].plus(sorting).plus(chosen))
    tiles, left_out = _in_tiles(model, grouped[0], pieces, read=model.moe_latent_size is not None)
    shared = model.moe_shared_expert_intermediate_size
    dense, shared_forward = 0.0, NOTHING
    if shared:
        shared_forward, shared_backward, dense = _mlp_of(model, rank, shared)
        shared_tiles, shared_left_out = _in_tiles(model, shared_forward, _pieces(model, rank.tokens))
        tiles, left_out = tiles.plus(shared_tiles), left_out.plus(shared_left_out)
        passes = [passes[0].plus(shared_forward), passes[1].plus(shared_backward)]
    passes[1] = passes[1].plus(tiles)
    modules = {
        "moe": passes[0].plus(left_out, -1),
        "moe_act": active[0],
        "shared_experts": shared_forward,
        "layernorm": _norm_again(model, rank),
    }
    forward, backward = (
        each.plus(_around(model, rank, back)) for each, back in zip(passes, (False, True), strict=True)
    )
    return Passes(forward, backward, _recomputed(model, modules, forward.plus(left_out, -1)), dense, weights)


def _mamba(model: ModelConfig, rank: Rank) -> Passes:
    """Return the work of a Mamba layer.

    The scan runs at attention's FLOP/s. Context parallel ranks exchange heads by all-to-all.
    """
    shape, tokens, hidden = MambaShape.of(model), rank.tokens, float(model.hidden_size)
    projected, inner = sum(shape.projected) / rank.tp, shape.inner / rank.tp
    shapes = [(tokens, hidden, projected), (tokens, inner, hidden)]
    passes = []
    for back in (False, True):
        scan = 5 * inner * shape.state_dim * tokens * (2 if back else 1) / rank.device.attention_flops[back]
        exchanged = rank.links.exchange(rank.cp, rank.tp, tokens * (projected + inner) * rank.item)
        moved = rank.moved((12 if back else 6) * tokens * (projected + inner))
        core = Work(elementwise=moved + scan, cp=exchanged, kernels=12)
        passes.append(rank.products(*shapes, backward=back).plus(core).plus(_around(model, rank, back)))
    modules = {"layernorm": _norm_again(model, rank)}
    weights = sum(k * n for _, k, n in shapes)
    return Passes(passes[0], passes[1], _recomputed(model, modules, passes[0]), weights)


def loss_work(model: ModelConfig, rank: Rank, rows: float) -> Passes:
    """Return the work of the output layer (at least 16 bits) and the loss.

    rows: padded vocabulary size, over all tensor parallel ranks.
    """
    own = replace(rank, gemm="bf16" if rank.gemm != "fp32" else "fp32")
    shape = (rank.tokens, float(model.hidden_size), rows / rank.tp)
    passes, each = [], 12 if model.cross_entropy_loss_fusion is False else 3  # reads and writes of each logit
    for back in (False, True):
        loss = Work(elementwise=rank.moved(each * rank.tokens * rows / rank.tp), kernels=8)
        whole = own.products(shape, backward=back).plus(loss)
        passes.append(whole.plus(rank.of_tensor_parallel(model.hidden_size, 1 if not back else 2)))
    return Passes(passes[0], passes[1], weights=shape[1] * shape[2])


_OF_PART = {"*": _attention, "-": _mlp, "E": _experts, "M": _mamba}
