"""Attention's largest scores, and the clipping of queries' and keys' weights by them (QK-clip, Kimi K2's MuonClip).

Other than ``megatron.core.optimizer.qk_clip`` it reaches float32 weights that the distributed optimizer has divided,
biases, and layers of hybrid models and of multi-token prediction; and it leaves heads alone whose largest score is
negative, which there become nan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from megatron_cp.mcore.private_names import main_part
from megatron_cp.parallel.collectives import max_over_ranks
from megatron_cp.training.setup import Run

Rows = tuple[Tensor, int]  # the factor of each head, or group of heads, and the number of its rows


def forget_max_logits(run: Run) -> None:
    """Begin a step: no score has been measured."""
    for attention in _measured(run):
        attention.core_attention.max_logits.fill_(-torch.inf)


@torch.no_grad()
def max_attention_logit(run: Run) -> float | None:
    """The largest score of a step in any layer, None where scores are not measured. Collective.

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
    """Multiply the weights of heads whose largest score is above the threshold: with them it would have been there."""
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
    """Each projection to queries or keys, and the factors of its rows, head by head or group by group."""
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
    """The attention layers of this rank that measure their scores."""
    for chunk in run.model:
        for module in chunk.modules():
            if getattr(getattr(module, "core_attention", None), "max_logits", None) is not None:
                yield module
