"""The memory of attention by groups of heads (models/layers/head_groups.py). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.memory.local_blocks import residual
from megatron_cp.estimate.memory.tape import ATTENTION, RESIDUAL, Moment, Step, cost_of


def by_groups(model: ModelConfig, b: int, inside: Sequence[Step], q: float, width: float, copied: float) -> Step:
    """Return projection and attention as one step.

    Sizes are bytes a token of all heads: ``q`` of the output, ``width`` of the projection, ``copied`` of other tensors
    that a group needs. ``inside``: the steps from the projection's output to attention's.
    """
    stream, whole, groups = residual(model, b), model.hidden_size * b, model.attention_head_groups
    lse = 4.0 * model.num_attention_heads / model.tensor_model_parallel_size
    keeps = {(RESIDUAL, "attention output"): stream, (ATTENTION, "output"): q, (ATTENTION, "lse"): lse}
    beside = q + whole  # gradients of the output and of the input
    if model.sequence_parallel:
        beside += whole  # the input of all tensor-parallel ranks
    moments = [
        Moment({}, beside + (sum(each.kept.values()) + each.gradients + copied - lse) / groups, whole * width)
        for each in cost_of(inside, 0.0).moments
    ]
    return Step(keeps, 0.0, again=moments)
