"""The steps of megatron-core's layers with our attention on a CPU. Pure.

Counted by ``tests/live_memory.py``. ``b`` is the bytes of an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_cp.attention.heads import sharing_groups
from megatron_cp.attention.transports.registry import known_transports
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.memory.head_groups import ANGLES, by_groups
from megatron_cp.estimate.memory.local_blocks import (
    after_steps,
    column_step,
    dropout_step,
    gate_keeps,
    last_norm_steps,
    norm_steps,
    received_parts,
    residual,
    row_step,
    sequence_parts,
)
from megatron_cp.estimate.memory.tape import ATTENTION, EXPERTS, LOGITS, MAMBA, MLP, RESIDUAL, Step
from megatron_cp.models.fusions import fuses_gate
from megatron_cp.models.layers.mamba.shape import MambaShape

__all__ = [
    "attention_steps",
    "dropout_step",
    "experts_steps",
    "last_norm_steps",
    "latent_attention_steps",
    "loss_steps",
    "mamba_steps",
    "mlp_products",
    "mlp_steps",
    "norm_steps",
]

CHUNK_SIZE = 64  # of models/layers/mamba/ssd.py


def attention_steps(model: ModelConfig, b: int, micro_batch_size: int, gathered: float) -> list[Step]:
    tp, heads = model.tensor_model_parallel_size, model.num_attention_heads
    channels = model.kv_channels or model.hidden_size // heads
    groups = model.attention_head_groups
    q, k = heads * channels * b / tp, sharing_groups(groups, model.kv_heads // tp) * model.kv_heads * channels * b / tp
    width = q + 2 * k
    steps = norm_steps(model, b, "attention")
    norms = len(steps)
    # Groups have tensors of their own for queries, keys and values. Else these are parts of one, and queries of several
    # key/value heads are put together.
    apart = groups > 1
    steps += [column_step(model, b, "attention", width / b), Step({}, width if apart else 2 * width)]
    together = not apart and model.kv_heads not in (heads, tp)
    if model.qk_layernorm:
        roots = (heads + model.kv_heads) * b / tp * (1 if model.normalization == "RMSNorm" else 2)
        normed = {(ATTENTION, "qkv"): q + k if apart else width, (ATTENTION, "roots"): roots}
        if together:
            normed[ATTENTION, "q"] = q
        if model.normalization == "RMSNorm":
            normed[ATTENTION, "normalized"] = q + k
        steps.append(Step(normed, 2 * width))
    rotates = model.position_embedding_type in ("rope", "yarn")
    plain = not rotates and not model.qk_layernorm
    viewed = plain and not exchanges_heads(model)
    if viewed and not together:
        steps.append(Step({(ATTENTION, "qkv"): width}, 2 * width))
    if rotates:
        tables = 4 * channels * b / micro_batch_size
        steps.append(Step({ANGLES: tables}, width + 3 * q))
    read = max(k, channels * b)  # with fewer groups than ranks, each has a whole head of keys
    core = core_steps(model, b, q, read, read, q, k if apart else width)
    if plain:  # keys, and queries of one or all groups, are where the projection has left them
        names = ["k rotated", *([] if together else ["q rotated"])]
        core = [_without(step, names if viewed else [], names) for step in core]
    steps += core
    if apart:
        norm, inside = steps[:norms], steps[norms + 1 :]
        received = received_parts(model, b)
        steps = [by_groups(model, b, norm, inside, q, width, exchanges_heads(model), gathered, received)]
    else:
        steps.append(row_step(model, b, (ATTENTION, "output"), q / b))
    return steps + after_steps(model, b, ATTENTION, "attention")


def _without(step: Step, kept: Sequence[str], inputs: Sequence[str]) -> Step:
    keeps = {key: size for key, size in step.keeps.items() if key[1] not in kept}
    return replace(step, keeps=keeps, inputs={key: size for key, size in step.inputs.items() if key[1] not in inputs})


def core_steps(model: ModelConfig, b: int, q: float, k: float, v: float, out: float, projected: float) -> list[Step]:
    """Return the steps of attention by transport.

    Sizes are bytes a token: queries, keys, values, outputs, and the projection that values are a view of.
    """
    cp = model.context_parallel_size
    lse = 4 * model.num_attention_heads / model.tensor_model_parallel_size
    inputs = {(ATTENTION, "q rotated"): q, (ATTENTION, "k rotated"): k, (ATTENTION, "qkv"): projected}
    keeps = {(ATTENTION, "q rotated"): q, (ATTENTION, "k read"): k, (ATTENTION, "v read"): v, (ATTENTION, "lse"): lse}
    transports, ring = known_transports(model.transports) if cp > 1 else (), _ring_size(model)
    if any(each.name == "all_gather" for each in transports):
        keeps = {**inputs, (ATTENTION, "lse"): lse}  # gathered again backward
        gradients = out + 2 * q + 2.75 * cp * (k + v)
    elif ring > 1:
        gradients = out + 1.5 * q + 5.5 * (k + v)
    else:
        gradients = out + 2 * (q + k + v)
    if v != k:  # the kernel wants heads of one size: it pads values, outputs and their gradients
        results = q + 2 * k
        if (ATTENTION, "k read") not in keeps:  # gathered
            gradients += 0.75 * cp * (k - v) + (k + 2 * q) / 2
        elif ring > 1:
            gradients = out + 4 * (k + v) + q + results + (k + 2 * q) / 2
        elif one_tile(model):
            gradients = out + results + max(k + 2 * q, q + k + v)
        else:  # sums of tiles, and the results and padded inputs of half of the rows
            gradients = out + q + k + v + results + (k + 2 * q) / 2
    name = "output of heads" if exchanges_heads(model) else "output"
    return [Step({**keeps, (ATTENTION, name): out}, gradients, module="core_attn", inputs=inputs)]


def exchanges_heads(model: ModelConfig) -> bool:
    """Return whether a transport copies queries, keys and values for attention."""
    return model.context_parallel_size > 1 and any(each.exchanges_heads for each in known_transports(model.transports))


def _ring_size(model: ModelConfig) -> int:
    """Return the number of ranks whose keys come to a rank's queries."""
    if not exchanges_heads(model):
        return model.context_parallel_size
    levels = model.hierarchical_context_parallel_sizes
    hierarchical = any(each.hierarchical for each in known_transports(model.transports))
    return levels[1] if hierarchical and levels else 1


def one_tile(model: ModelConfig) -> bool:
    """Return whether attention is one kernel call (attention/kernels/cpu.py)."""
    return _ring_size(model) == 1 and (model.seq_length or 0) <= 256


def mlp_products(model: ModelConfig, b: int, kind: str, width: float) -> list[Step]:
    """Return the steps of both products and the activation; ``width``: on this rank."""
    inner = 2 if model.gated_linear_unit else 1
    return [
        column_step(model, b, "mlp", inner * width),
        activation_step(model, kind, width * b),
        row_step(model, b, (kind, "activation"), width),
    ]


def mlp_steps(model: ModelConfig, b: int) -> list[Step]:
    width = (model.ffn_hidden_size or 4 * model.hidden_size) / model.tensor_model_parallel_size
    inside = mlp_products(model, b, MLP, width)
    inside = [replace(step, module="mlp", inputs={(RESIDUAL, "mlp output"): residual(model, b)}) for step in inside]
    return [*norm_steps(model, b, "mlp"), *inside, *after_steps(model, b, MLP, "mlp")]


def activation_step(model: ModelConfig, kind: str, f: float) -> Step:
    """Return the step of the activation; ``f``: bytes a token of its output."""
    if model.gated_linear_unit:
        return Step({(kind, "matrix 1"): 2 * f, **gate_keeps(model, kind, f)}, (3 + fuses_gate(model)) * f)
    return Step({(kind, "matrix 1"): f}, (4 if model.activation_func == "squared_relu" else 2) * f)


def experts_steps(model: ModelConfig, b: int, load: float) -> list[Step]:
    hidden, topk, count = model.hidden_size, model.moe_router_topk, model.num_moe_experts or 1
    parts, etp = sequence_parts(model), model.expert_tensor_parallel_size or 1
    local = count // model.expert_model_parallel_size
    width = (model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * hidden) / etp
    inside = (model.moe_latent_size or hidden) * b
    stream, routed = residual(model, b), topk / parts * etp * load
    e = routed * width * b
    out = routed * inside
    steps = []
    inner = 2 if model.gated_linear_unit else 1
    if shared := model.moe_shared_expert_intermediate_size:
        s = shared * b / model.tensor_model_parallel_size
        keeps = {(EXPERTS, "shared 1"): inner * s, (EXPERTS, "shared activation"): s}
        keeps |= gate_keeps(model, EXPERTS, s, "shared ")
        if model.moe_shared_expert_gate:
            keeps[EXPERTS, "shared output"] = stream
        steps.append(Step(keeps, (3 + fuses_gate(model)) * s + stream))
    scores = 5 * count + (4 * count if model.moe_aux_loss_coeff else 0)  # the auxiliary loss has its own softmax
    router = (scores + topk * (8 + b)) / parts
    steps.append(Step({(RESIDUAL, "experts output"): stream, (EXPERTS, "router"): router}, 3 * stream))
    steps.append(Step({(EXPERTS, "order"): routed * (8 + b) + 8 * count / parts}, stream + out))
    steps.append(Step({(EXPERTS, "tokens"): out}, 2 * out, inside * width * inner))
    keeps = {(EXPERTS, "matrix 1"): inner * e, (EXPERTS, "plain activation"): e}
    keeps |= gate_keeps(model, EXPERTS, e)
    steps.append(Step(keeps, out + out / local + (3 + fuses_gate(model)) * e / local))
    forward = (2 + (model.moe_shared_expert_intermediate_size is not None)) * stream
    if model.expert_model_parallel_size * etp > 1:  # back to the ranks that the tokens are from
        forward += 3 * out + topk / parts * inside - 2 * stream
    else:
        forward += 2 * out
    steps.append(Step({(EXPERTS, "activation"): e}, out + e / local, inside * width, forward=forward))
    steps = [replace(step, module="moe", inputs={(RESIDUAL, "experts output"): stream}) for step in steps]
    return [*norm_steps(model, b, "experts"), *steps, *after_steps(model, b, EXPERTS, "experts")]


def latent_attention_steps(model: ModelConfig, b: int, micro_batch_size: int) -> list[Step]:
    """Return the steps of latent attention, with sizes as in :func:`attention_steps`.

    Keys and values come from one latent vector.
    """
    tp, heads, stream = model.tensor_model_parallel_size, model.num_attention_heads, residual(model, b)
    q = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim) * b / tp
    v = heads * model.v_head_dim * b / tp
    rank, latent = (model.q_lora_rank or 0) * b, model.kv_lora_rank * b
    shared = model.qk_pos_emb_head_dim * b
    steps = norm_steps(model, b, "attention")
    steps.append(Step({(RESIDUAL, "attention output"): stream}, rank + latent + shared + 2 * stream, 0))
    normed = 2 if model.normalization == "RMSNorm" else 1
    keeps = {(ATTENTION, "compressed"): float(rank + latent + shared)}
    if model.qk_layernorm:
        keeps[ATTENTION, "normalized"] = normed * (rank + latent) / sequence_parts(model)
        keeps[ATTENTION, "roots"] = b * (1 + (model.q_lora_rank is not None)) / sequence_parts(model)
    steps.append(Step(keeps, 2 * (rank + latent + shared) + q + v, 0))
    tables = 4 * model.qk_pos_emb_head_dim * b / micro_batch_size
    steps.append(Step({(ATTENTION, "angles"): tables}, 4 * q + v))
    padded = q if model.sequence_packing_scheduler else v  # megatron-core pads the values of packs
    steps += core_steps(model, b, q, q, padded, padded, v)
    steps.append(row_step(model, b, (ATTENTION, "output" if padded == v else "unpadded output"), v / b))
    return steps + after_steps(model, b, ATTENTION, "attention")


def mamba_steps(model: ModelConfig, b: int, fused_norm: bool) -> list[Step]:
    """Return the steps of the scan in PyTorch (models/layers/mamba/ssd.py), in float32"""
    tp, whole = model.tensor_model_parallel_size, MambaShape.of(model)
    own = MambaShape(whole.heads // tp, max(1, whole.groups // tp), whole.head_dim, whole.state_dim)
    # Context parallel ranks exchange tokens for heads. Ranks whose heads share a group have a copy of it each.
    shape = replace(own, groups=max(own.groups, model.context_parallel_size))
    heads, inner, conv, f = shape.heads, shape.inner * 4, sum(shape.convolved) * 4, 4
    states, pair, within = shape.groups * shape.state_dim * f, shape.groups * CHUNK_SIZE * f, heads * CHUNK_SIZE * f
    of_heads, chunk_states = heads * shape.state_dim * f, inner * shape.state_dim / CHUNK_SIZE
    projected = sum(shape.projected)
    steps = [*norm_steps(model, b, "mamba"), column_step(model, b, "mamba", sum(own.projected))]
    keeps: dict[tuple[str, str], float] = {(MAMBA, "projected"): projected * b, (MAMBA, "convolution"): 5 * conv}
    steps.append(Step(keeps, 3 * conv + projected * b))
    steps.append(Step({(MAMBA, "steps"): 2 * heads * f, (MAMBA, "x dt"): inner}, conv + 3 * inner))
    keeps = {(MAMBA, "B and C"): 2 * states, (MAMBA, "C B"): pair, (MAMBA, "decay"): within}
    steps.append(Step(keeps, 3 * within + pair + 2 * inner + 2 * states + 4 * heads * f))
    steps.append(Step({(MAMBA, "weighted"): within, (MAMBA, "x of chunks"): inner}, within + 4 * inner))
    keeps = {(MAMBA, "to end"): inner, (MAMBA, "of heads"): 2 * of_heads, (MAMBA, "states"): 2 * chunk_states}
    keeps[MAMBA, "carried"] = 2 * heads * f
    steps.append(Step(keeps, of_heads + 4 * inner))
    keeps = {(MAMBA, "from before"): inner, (MAMBA, "y"): inner, (MAMBA, "z"): inner, (MAMBA, "gated"): inner}
    steps.append(Step(keeps, 3 * inner))
    # The norm's backward pass frees the normalized groups before its last part, as other norms do.
    steps.append(Step({(MAMBA, "roots"): 2 * shape.groups * f}, 5 * inner + shape.groups * f))
    steps.append(Step({(MAMBA, "normalized groups"): inner}, 4 * inner))
    return [*steps, row_step(model, b, (MAMBA, "normalized"), shape.inner), *after_steps(model, b, MAMBA, "mamba")]


def loss_steps(model: ModelConfig, b: int, rows: int, tokens_at_once: int | None) -> list[Step]:
    """Return the steps of output layer and loss, in place, in float32."""
    output = column_step(model, b, "ending", rows)
    whole = model.hidden_size * b
    if tokens_at_once is not None:  # logits, their gradients and the weight's, of a piece; and the weight's sum
        piece = tokens_at_once * (rows * 4 + (rows * b if b < 4 else 0) + whole)
        return [Step(output.keeps, residual(model, b) + 8.0, piece + whole * rows * (1 + 4 / b))]
    logits = {(LOGITS, "softmax"): rows * 4.0}
    small = {(LOGITS, "targets"): 17.0}
    rounded = rows * b if b < 4 else 0
    return [
        Step({**output.keeps, **logits}, output.gradients - rows * b + rounded, output.weight),
        Step({**logits, **small}, 8.0),
    ]
