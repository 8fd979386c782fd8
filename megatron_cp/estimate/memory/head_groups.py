"""The memory of attention by groups of heads (models/layers/head_groups.py). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cp.attention.heads import GATHERED_TOKENS
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.memory.local_blocks import residual
from megatron_cp.estimate.memory.tape import ATTENTION, RESIDUAL, Moment, Step, cost_of


def by_groups(model: ModelConfig, b: int, inside: Sequence[Step], q: float, width: float, exchanged: bool) -> Step:
    """Return projection and attention as one step.

    ``inside``: the steps from the projection's output to attention's. ``q``, ``width``: bytes a token of output and
    projection, for all heads. ``exchanged``: a transport copies them.
    """
    stream, whole, groups = residual(model, b), model.hidden_size * b, model.attention_head_groups
    lse = 4.0 * model.num_attention_heads / model.tensor_model_parallel_size
    keeps = {(RESIDUAL, "attention output"): stream, (ATTENTION, "output"): q, (ATTENTION, "lse"): lse}
    beside = q + stream  # gradients of the output and of the input
    # A group's output is copied; its gradient is a part of all heads', unless it is exchanged.
    others = (q if exchanged else -q) - lse
    if not any((ATTENTION, "qkv") in step.keeps for step in inside):
        others += width  # the projection stays until its gradient is complete
    weight = whole * width
    if model.sequence_parallel:
        weight += 2 * GATHERED_TOKENS * whole  # a piece of all ranks' tokens, and its gradient
    moments = [
        Moment({}, beside + (sum(each.kept.values()) + each.gradients + others) / groups, weight)
        for each in cost_of(inside, 0.0).moments
    ]
    return Step(keeps, 0.0, again=moments)
