"""From a configuration to schedules: what keeps step, what a microbatch costs, and the call of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cp.attention.transports.registry import cost_transport
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.dynamic_cp.cost import DEVICES, CostModel, ModelShape, cost_model
from megatron_cp.dynamic_cp.scheduler.fixed import schedule_fixed_cp
from megatron_cp.dynamic_cp.scheduler.schedule import schedule
from megatron_cp.dynamic_cp.types import Schedule
from megatron_cp.estimate.flops import (
    flops_per_pair,
    flops_per_token,
    head_dims,
    layers_with_parts,
    pairs_of_samples,
)
from megatron_cp.parallel.layout import RankLayout


def keeps_step(model: ModelConfig) -> bool:
    """Whether all ranks run equally many microbatches: pipeline stages and experts meet in each of them."""
    tp = model.tensor_model_parallel_size
    shared_experts = model.expert_model_parallel_size > 1 or (model.expert_tensor_parallel_size or tp) > tp
    return model.pipeline_model_parallel_size > 1 or shared_experts


def sequence_parallel_size(model: ModelConfig) -> int:
    """Tensor-parallel ranks that split a rank's tokens once more."""
    return model.tensor_model_parallel_size if model.sequence_parallel else 1


def make_schedule(model: ModelConfig, layout: RankLayout, lengths: Sequence[int], cost: CostModel) -> Schedule:
    """The schedule of one global batch, as configured; the same on every rank. Raises ValueError for what cannot be."""
    assert model.max_seqlen_per_dp_cp_rank is not None
    in_step, num_ranks, most = what_keeps_step(model, layout), layout.dp * layout.cp, model.max_seqlen_per_dp_cp_rank
    common: dict[str, Any] = {"cost": cost, "sequence_parallel_size": sequence_parallel_size(model)}
    if model.dynamic_context_parallel:
        least = model.min_dynamic_context_parallel_size
        return schedule(lengths, num_ranks, most, min_cp_size=least, **in_step, **common)
    common["microbatch_multiple"] = in_step["microbatch_multiple"]
    return schedule_fixed_cp(lengths, num_ranks, most, cp_size=layout.cp, **common)


def what_keeps_step(model: ModelConfig, layout: RankLayout) -> dict[str, Any]:
    """``microbatch_multiple``, ``sync_ranks`` and ``pipeline_size`` of a run, as the scheduler knows them."""
    multiple = 1
    if model.virtual_pipeline_model_parallel_size is not None:
        multiple = model.microbatch_group_size_per_vp_stage or model.pipeline_model_parallel_size
    return {"microbatch_multiple": multiple, "sync_ranks": sync_ranks(layout), "pipeline_size": layout.pp}


def of_every_schedule(model: ModelConfig, layout: RankLayout) -> dict[str, Any] | None:
    """What each line of ``schedules.jsonl`` says of the run; None where nothing is packed."""
    if model.sequence_packing_scheduler is None:
        return None
    return dict(context_parallel_size=model.context_parallel_size, **what_keeps_step(model, layout))


def sync_ranks(layout: RankLayout) -> int:
    """Neighbouring ranks of a domain that meet in every microbatch, because they share experts."""
    domain = layout.dp * layout.cp
    together = -(-layout.ep * layout.etp // layout.tp)
    return together if domain % together == 0 else domain


def device_name() -> str:
    """Which of :data:`DEVICES` this machine's is taken for."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return next((key for key in DEVICES if key in name), "H100")


def model_cost(model: ModelConfig, longest: int) -> CostModel:
    """The cost model of a model on this machine, before anything was measured; ``longest``: tokens of a sample."""
    device = DEVICES[device_name()]
    layers = layers_with_parts(model)
    attending = sum("*" in parts for _, parts in layers)
    per_token = flops_per_token(model, model.vocab_size or 32768)
    growing, constant = _keys_seen(model, longest, per_token)
    shape = ModelShape(
        layers=len(layers),
        attention_heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=sum(head_dims(model)) / 2,
        active_parameters=per_token / 2,
        attention_layers=attending,
        causal_share=2 * growing / max(1, attending),
        seen_keys=constant / max(1, attending),
    )
    return cost_model(
        shape,
        device,
        tensor_parallel_size=model.tensor_model_parallel_size,
        transport=cost_transport(model.transports),
    )


def _keys_seen(model: ModelConfig, longest: int, per_token: int) -> tuple[float, float]:
    """``a`` and ``b`` of ``a * s + b``, the keys that a token of a sample of s tokens sees, summed over the layers.

    Exact without sliding windows. With them attention is neither quadratic nor linear in s: this sum of both has the
    least squared error, relative to a sample's whole cost, at the longest sample, a half, a quarter ... of it; below a
    128th attention hardly costs. In plain floats, because every rank must get the same bits, whatever its CPU.
    """
    per_pair = flops_per_pair(model)
    ss = st = tt = sp = tp = 0.0
    lengths = [max(1, max(2, longest) >> halvings) for halvings in range(8)]
    for length, pairs in zip(lengths, pairs_of_samples(model, lengths).tolist(), strict=True):
        whole = pairs * per_pair + length * per_token
        square, token, target = length * length / whole, length / whole, pairs / whole
        ss, st, tt = ss + square * square, st + square * token, tt + token * token
        sp, tp = sp + square * target, tp + token * target
    determinant = ss * tt - st * st
    # Rounding can take one that is zero, as where a token sees itself only, below it.
    return max(0.0, (sp * tt - tp * st) / determinant), max(0.0, (ss * tp - st * sp) / determinant)
