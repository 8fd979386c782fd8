"""The steps of Transformer Engine's layers on a GPU, in bf16. Pure.

Written from knowledge of Transformer Engine's interface and the references in docs/explanation/memory.md. Not run: no
figure was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.attention.heads import sharing_groups
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.memory import local_blocks, local_layers
from megatron_cp.estimate.memory.head_groups import by_groups
from megatron_cp.estimate.memory.local_blocks import gate_keeps, residual, row_step
from megatron_cp.estimate.memory.tape import ATTENTION, EXPERTS, LOGITS, MAMBA, MLP, RESIDUAL, Step
from megatron_cp.models.fusions import fused_loss
from megatron_cp.models.layers.mamba.shape import MambaShape


def norm_and_column_steps(model: ModelConfig, b: int, name: str, width: float) -> list[Step]:
    """Return the step of a fused norm and product; ``width``: output on this rank."""
    return [*norm_steps(model, b, name), column_without_weight(model, b, name, width)]


def column_without_weight(model: ModelConfig, b: int, name: str, width: float) -> Step:
    """Return the step of a product that accumulates its weight gradient itself.

    NCCL adds what it receives.
    """
    step = local_blocks.column_step(model, b, name, width)
    return replace(step, weight=0.0, gradients=step.gradients - local_blocks.received_parts(model, b))


def row_without_weight(model: ModelConfig, b: int, keeps: tuple[str, str], width: float) -> Step:
    """Return the step of a product that accumulates its weight gradient itself."""
    return replace(row_step(model, b, keeps, width), weight=0.0)


def after_steps(model: ModelConfig, b: int, kind: str, name: str) -> list[Step]:
    """Return the steps of sandwich norm and dropout; its mask has a byte an element."""
    steps = local_blocks.after_steps(model, b, kind, name)
    return [*steps[:-1], dropout_step(model, b, name)] if model.hidden_dropout else steps


def dropout_step(model: ModelConfig, b: int, name: str) -> Step:
    return Step({(RESIDUAL, f"{name} mask"): residual(model, b) / b}, residual(model, b))


def norm_steps(model: ModelConfig, b: int, name: str) -> list[Step]:
    """Return the step of a norm without a fused product."""
    roots = (4.0 if model.normalization == "RMSNorm" else 8.0) / local_blocks.sequence_parts(model)
    keeps = {(RESIDUAL, f"{name} input"): residual(model, b), (RESIDUAL, f"{name} root"): roots}
    return [Step(keeps, 3 * residual(model, b))]


def last_norm_steps(model: ModelConfig, b: int) -> list[Step]:
    return norm_steps(model, b, "ending")


def _norm_output(model: ModelConfig, b: int) -> float:
    """Return what is kept of a norm's output where no product is fused with the norm."""
    again = model.recompute_granularity == "selective" and "layernorm" in (model.recompute_modules or [])
    return 0.0 if again else residual(model, b)


def attention_steps(model: ModelConfig, b: int, micro_batch_size: int, gathered: float) -> list[Step]:
    tp, heads = model.tensor_model_parallel_size, model.num_attention_heads
    channels = model.kv_channels or model.hidden_size // heads
    sharing = sharing_groups(model.attention_head_groups, model.kv_heads // tp)
    q, k = heads * channels * b / tp, sharing * model.kv_heads * channels * b / tp
    width = q + 2 * k
    core = core_steps(model, q, k, k, q)
    apart = model.attention_head_groups > 1  # else queries, keys and values are parts of one tensor
    inside = [Step({}, width if apart else 2 * width), *core]
    if model.qk_layernorm:
        inside.insert(0, Step({(ATTENTION, "q and k before norms"): q + k}, 2 * width))
    if apart:
        # The transports are ours, with their buffers; the kernel's sums are Transformer Engine's.
        (ours,) = local_layers.core_steps(model, b, q, k, k, q, k)
        inside[-1] = replace(ours, gradients=max(ours.gradients, core[0].gradients))
        exchanged = local_layers.exchanges_heads(model)
        norm = norm_steps(model, b, "attention")
        steps = [by_groups(model, b, norm, inside, q, width, exchanged, gathered, received=0.0)]
    else:
        steps = [*norm_and_column_steps(model, b, "attention", width / b), *inside]
        steps.append(row_without_weight(model, b, (ATTENTION, "output"), q / b))
    return steps + after_steps(model, b, ATTENTION, "attention")


def core_steps(model: ModelConfig, q: float, k: float, v: float, out: float) -> list[Step]:
    lse = 4 * model.num_attention_heads / model.tensor_model_parallel_size
    keeps = {(ATTENTION, "q"): q, (ATTENTION, "k"): k, (ATTENTION, "v"): v, (ATTENTION, "output"): out}
    inputs = {name: size for name, size in keeps.items() if name != (ATTENTION, "output")}
    keeps[ATTENTION, "lse"] = lse
    cp = model.context_parallel_size
    gradients = out + 3 * q + k + v + (2 * (k + v) if cp > 1 else 0)  # dq is summed in float32
    return [Step(keeps, gradients, module="core_attn", inputs=inputs)]


def latent_attention_steps(model: ModelConfig, b: int, micro_batch_size: int) -> list[Step]:
    tp, heads, stream = model.tensor_model_parallel_size, model.num_attention_heads, residual(model, b)
    q = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim) * b / tp
    v = heads * model.v_head_dim * b / tp
    padded = q if model.sequence_packing_scheduler else v  # megatron-core pads the values of packs
    compressed = ((model.q_lora_rank or 0) + model.kv_lora_rank + model.qk_pos_emb_head_dim) * b
    steps = [
        *norm_steps(model, b, "attention"),
        Step({(RESIDUAL, "attention output"): _norm_output(model, b)}, 2 * stream + compressed),
        Step({(ATTENTION, "compressed"): 2 * compressed}, 2 * compressed + q + v),
        Step({}, 3 * q + v),
        *core_steps(model, q, q, padded, padded),
        row_without_weight(model, b, (ATTENTION, "output" if padded == v else "unpadded output"), v / b),
    ]
    return steps + after_steps(model, b, ATTENTION, "attention")


def mlp_products(model: ModelConfig, b: int, kind: str, width: float) -> list[Step]:
    """Return the steps of both products and the activation; ``width``: on this rank."""
    inner = 2 if model.gated_linear_unit else 1
    return [
        column_without_weight(model, b, "mlp", inner * width),
        Step({(kind, "matrix 1"): inner * width * b, **gate_keeps(model, kind, width * b)}, (1 + inner) * width * b),
        row_without_weight(model, b, (kind, "activation"), width),
    ]


def mlp_steps(model: ModelConfig, b: int) -> list[Step]:
    width = (model.ffn_hidden_size or 4 * model.hidden_size) / model.tensor_model_parallel_size
    inside = [
        replace(step, module="mlp", inputs={(RESIDUAL, "mlp output"): 0.0})
        for step in mlp_products(model, b, MLP, width)
    ]
    return [*norm_steps(model, b, "mlp"), *inside, *after_steps(model, b, MLP, "mlp")]


def experts_steps(model: ModelConfig, b: int, load: float) -> list[Step]:
    hidden, topk, count = model.hidden_size, model.moe_router_topk, model.num_moe_experts or 1
    parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
    etp = model.expert_tensor_parallel_size or 1
    width = (model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * hidden) / etp
    inner = 2 if model.gated_linear_unit else 1
    stream, routed = residual(model, b), topk / parts * etp * load
    e, out = routed * width * b, routed * (model.moe_latent_size or hidden) * b
    router = (3 * 4 * count + topk * 8) / parts
    # Without a fused function the product with the router's weight is an operation of its own, and keeps its input.
    separate = gates | {(EXPERTS, "plain activation"): e} if (gates := gate_keeps(model, EXPERTS, e)) else {}
    steps = [
        Step({(RESIDUAL, "experts output"): _norm_output(model, b), (EXPERTS, "router"): router}, 3 * stream),
        Step({(EXPERTS, "tokens"): out, (EXPERTS, "probabilities"): 4 * routed}, 2 * out + inner * e),
        Step({(EXPERTS, "matrix 1"): inner * e, **separate}, (1 + inner) * e + out),
        Step({(EXPERTS, "activation"): e}, 2 * out + e),
    ]
    if shared := model.moe_shared_expert_intermediate_size:
        s = shared * b / model.tensor_model_parallel_size
        keeps = {(EXPERTS, "shared 1"): inner * s, (EXPERTS, "shared activation"): s}
        steps.append(Step(keeps | gate_keeps(model, EXPERTS, s, "shared "), (1 + inner) * s + stream))
    steps = [
        replace(step, module="moe", inputs={(RESIDUAL, "experts output"): _norm_output(model, b)}) for step in steps
    ]
    return [*norm_steps(model, b, "experts"), *steps, *after_steps(model, b, EXPERTS, "experts")]


def mamba_steps(model: ModelConfig, b: int, fused_norm: bool) -> list[Step]:
    """Return the steps of a Mamba layer.

    mamba-ssm's fused kernel keeps its input and output, and makes the rest again.
    fused_norm: of Platform. This project's norm keeps its input and the normalized input in float32.
    """
    tp, shape = model.tensor_model_parallel_size, MambaShape.of(model)
    projected, inner = sum(shape.projected) / tp, shape.inner / tp
    gated = inner * b if fused_norm else 2 * inner * 4
    return [
        *norm_and_column_steps(model, b, "mamba", projected),
        Step({(MAMBA, "projected"): projected * b, (MAMBA, "scanned"): inner * b}, (3 * projected + inner) * b),
        Step({(MAMBA, "gated"): gated, (MAMBA, "roots"): 4 * shape.groups / tp}, 2 * inner * 4),
        row_without_weight(model, b, (MAMBA, "normalized"), inner),
    ]


def loss_steps(model: ModelConfig, b: int, rows: int, tokens_at_once: int | None) -> list[Step]:
    """Return the steps of output layer and loss.

    TE's loss writes gradients over the logits. Other losses use float32, as on a CPU.
    """
    if fused_loss(model, te_layers=True) != "te":
        return local_layers.loss_steps(model, b, rows, tokens_at_once)
    stream, whole = residual(model, b), model.hidden_size * b
    keeps = {(RESIDUAL, "ending output"): stream}
    gathered = 2 * whole if model.sequence_parallel else whole
    if tokens_at_once is not None:
        piece = tokens_at_once * (rows * b + whole)
        return [Step(keeps, stream + 8.0, piece + whole * rows * (1 + 4 / b))]
    logits = {(LOGITS, "logits"): float(rows * b)}
    return [Step({**keeps, **logits}, stream + gathered, whole * rows), Step(logits, rows * b / 8)]
