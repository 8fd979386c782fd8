"""Gradients of a step: prepared and measured on the device, then applied.

megatron-core's ``optimizer.step()`` does both, and the host waits for the norm in between. A check for non-finite
gradients would read them once more, and wait once more. Here the norm serves as the check, and is read together with
the losses.

After a step, ``qk_clip`` shrinks query and key weights (QK-clip, of Kimi K2's MuonClip). It covers cases that
``megatron.core.optimizer.qk_clip`` does not: float32 weights divided by the distributed optimizer, biases, hybrid
models, and multi-token prediction. It skips heads whose largest score is negative, which become nan there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from megatron_cp.config.run_config import OptimizerConfig
from megatron_cp.mcore.private_names import main_part
from megatron_cp.parallel.collectives import max_over_ranks, sum_over_ranks
from megatron_cp.training.setup import Run

_LARGEST_WITH_A_SQUARE = math.sqrt(torch.finfo(torch.float32).max)
Norm = Callable[[list[Tensor]], Tensor]
Rows = tuple[Tensor, int]  # the factor of each head or group of heads, and its number of rows
Counted = list[tuple[MegatronOptimizer, list[Tensor]]]  # the gradients that enter the norm


@torch.no_grad()
def measure_gradients(run: Run) -> tuple[Tensor, Tensor]:
    """Prepare the gradients and return norm and non-finite flag, [1] each. Collective.

    Both stay on the device. The flag is 1 if a gradient of this rank may not be finite; large gradients count too,
    because their squares overflow. The norm leaves out duplicated parameters, so the flag checks these as well.
    """
    run.optimizer.prepare_grads()
    counted = _counted(run)
    norm = _norm_of_all(run, counted, _norm_in_float32)
    seen = {id(grad) for _, grads in counted for grad in grads}
    grads = (parameter.grad for optimizer, _ in counted for parameter in optimizer.get_parameters())
    copies = [grad for grad in grads if grad is not None and id(grad) not in seen]
    finite = torch.isfinite(norm + torch.nn.utils.get_total_norm(copies))
    return norm, (~finite).double()


@torch.no_grad()
def unscale_gradients(run: Run) -> float | None:
    """Unscale fp16 gradients and adapt the loss scale. Collective.

    Returns:
        The gradient norm, or None after an overflow.
    """
    if run.optimizer.prepare_grads():
        return None
    return exact_norm(run, float(_norm_of_all(run, _counted(run), _norm_in_float32)))


@torch.no_grad()
def exact_norm(run: Run, measured: float) -> float:
    """Return ``measured``, or recompute a non-finite norm in float64. Collective.

    Float64 holds the squares of all float32 numbers: the result is finite if all gradients are.
    """
    return measured if math.isfinite(measured) else float(_norm_of_all(run, _counted(run), _norm_in_float64))


def overflows_in_optimizer(optimizer: OptimizerConfig, norm: float) -> bool:
    """Return whether clipped gradients of ``norm`` may overflow Adam's second moment.

    Adam never recovers from such an overflow.
    """
    clipped = min(norm, optimizer.clip_grad or norm)
    return not math.isfinite(norm) or (optimizer.optimizer != "sgd" and clipped > _LARGEST_WITH_A_SQUARE)


def _counted(run: Run) -> Counted:
    return [(each, each.get_grads_for_grad_norm()) for each in run.optimizer.chained_optimizers]


def _norm_of_all(run: Run, counted: Counted, norm: Norm) -> Tensor:
    """Return the norm over all ranks: [1], float64. ``norm`` computes it for one list."""
    square = torch.zeros(1, dtype=torch.float64, device=run.device)
    for optimizer, grads in counted:  # the expert optimizer sums over other ranks
        part = norm(grads).double() ** 2 if grads else torch.zeros_like(square)
        square += sum_over_ranks(part, optimizer.get_grad_stats_parallel_group())
    return square.sqrt()


def _norm_in_float32(grads: list[Tensor]) -> Tensor:
    overflow = torch.zeros(1, dtype=torch.int, device=grads[0].device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [grads], False)
    return norm


def _norm_in_float64(grads: list[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1)


@torch.no_grad()
def apply_gradients(optimizer: MegatronOptimizer, norm: float) -> bool:
    """Clip the gradients of this ``norm`` and step; return whether the step succeeded."""
    for each in optimizer.chained_optimizers:
        if each.config.clip_grad > 0.0:
            clip_grads.clip_grad_by_total_norm_fp32(each.get_parameters(), each.config.clip_grad, norm)
    return optimizer.step_with_ready_grads()


def forget_max_logits(run: Run) -> None:
    """Begin a step: no score has been measured."""
    for attention in _measured(run):
        attention.core_attention.max_logits.fill_(-torch.inf)


@torch.no_grad()
def max_attention_logit(run: Run) -> float | None:
    """Return the largest attention score of a step; None if not measured. Collective.

    Leaves each head's largest score over all data- and context-parallel ranks in its layer.
    """
    config, layers = run.core_config, list(_measured(run))
    if not (config.qk_clip or config.log_max_attention_logit):
        return None
    largest = torch.full((1,), -torch.inf, device=run.device)
    if layers:
        heads = torch.stack([attention.core_attention.max_logits for attention in layers])
        max_over_ranks(heads, run.groups.dp_cp)
        for attention, of_layer in zip(layers, heads, strict=True):
            attention.core_attention.max_logits.copy_(of_layer)
        largest = heads.max().view(1)
    return max_over_ranks(largest, run.all_ranks).item()


@torch.no_grad()
def clip_queries_and_keys(run: Run) -> None:
    """Scale the weights of heads with a score above the threshold down to it."""
    for attention in _measured(run) if run.core_config.qk_clip else ():
        for projection, rows in _factors(attention):
            factors = torch.cat([factor[:, None].expand(-1, count) for factor, count in rows], dim=1).flatten()
            for parameter in (projection.weight, projection.bias):
                if parameter is not None and parameter.numel():
                    _multiply(run, parameter, factors.view(-1, *[1] * (parameter.ndim - 1)).expand_as(parameter))


def _multiply(run: Run, parameter: Tensor, factors: Tensor) -> None:
    parameter.mul_(factors)
    part = main_part(run.optimizer, parameter)
    if part is not None:
        main, start = part
        main.mul_(factors.flatten()[start : start + main.numel()].view_as(main))


def _factors(attention: Attention) -> Iterator[tuple[Any, list[Rows]]]:
    """Yield each query or key projection with the factors of its rows."""
    config, largest = attention.config, attention.core_attention.max_logits
    eta = config.qk_clip_threshold / largest.clamp(min=config.qk_clip_threshold)
    if isinstance(attention, MultiLatentAttention):
        queries = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
        # All heads share the part of the keys with positions: the queries' takes the whole factor.
        turned = (eta, config.qk_pos_emb_head_dim)
        yield queries, [(eta**config.qk_clip_alpha, config.qk_head_dim), turned]
        keys = (eta ** (1 - config.qk_clip_alpha), config.qk_head_dim)
        yield attention.linear_kv_up_proj, [keys, (torch.ones_like(eta), config.v_head_dim)]
        return
    groups, dim = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    eta = eta.view(groups, -1).amin(1)
    width, ones = largest.numel() // groups * dim, torch.ones_like(eta)
    gate = [(ones, width)] if config.attention_output_gate else []
    keys_and_values = [(eta ** (1 - config.qk_clip_alpha), dim), (ones, dim)]
    yield attention.linear_qkv, [(eta**config.qk_clip_alpha, width), *gate, *keys_and_values]


def _measured(run: Run) -> Iterator[Attention]:
    """Return this rank's attention layers that measure scores."""
    for chunk in run.model:
        for module in chunk.modules():
            if getattr(getattr(module, "core_attention", None), "max_logits", None) is not None:
                yield module
