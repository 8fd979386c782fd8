"""The memory of attention by groups of heads (models/layers/head_groups). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_cp.attention.heads import sharing_groups
from megatron_cp.attention.transports.registry import known_transports
from megatron_cp.config.model_config import ModelConfig
from megatron_cp.estimate.memory.local_blocks import residual
from megatron_cp.estimate.memory.tape import ATTENTION, RESIDUAL, Moment, Step, cost_of

ANGLES = ATTENTION, "angles"


def by_groups(
    model: ModelConfig,
    b: int,
    norm: Sequence[Step],
    inside: Sequence[Step],
    q: float,
    width: float,
    exchanged: bool,
    gathered: float,
    received: float,
) -> Step:
    """Return attention with its norm and both projections as one step.

    Args:
        norm: the steps of the norm.
        inside: the steps from the first projection's output to attention's.
        q, width: bytes a token of attention's output and of the first projection, for all groups.
        exchanged: a transport copies them.
        gathered: tokens of a piece.
        received: bytes a token of other ranks' parts of a piece's gradient.
    """
    stream, whole, groups = residual(model, b), model.hidden_size * b, model.attention_head_groups
    lse = 4.0 * model.num_attention_heads / model.tensor_model_parallel_size
    keeps = {(RESIDUAL, "attention input"): stream, (ATTENTION, "output"): q, (ATTENTION, "lse"): lse}
    beside = stream  # gradient of the norm's output, then of the input
    others = (q if exchanged else 0.0) - lse
    inside = [_with_whole_angles(step, groups) for step in inside]
    others += _neighbours(model, inside[:-1], q, width)
    sharing = sharing_groups(groups, model.kv_heads // model.tensor_model_parallel_size)
    sums_of_groups = 4 / b if sharing > 1 else 1.0
    # The gradients of both weights.
    weight = model.hidden_size * (q + (q + (width - q) / sharing) * sums_of_groups)
    moments = [
        Moment({}, beside + (sum(each.kept.values()) + each.gradients + others) / groups, weight)
        for each in cost_of(inside, 0.0).moments
    ]
    # Before it a group's gradients of output and weight, after it those of input and weight, in pieces of the tokens.
    sums = model.hidden_size * 4 / b / groups
    before = gathered * ((whole if model.sequence_parallel else 0.0) + q / groups)
    after = gathered * (whole + stream + width / groups)
    if model.sequence_parallel:
        after = gathered * (2 * whole + received + stream + width / groups)
    near = _neighbours(model, inside[:-1], q, width)
    moments.append(Moment({}, beside + (q + near) / groups, weight + sums * q + before))
    moments.append(Moment({}, beside + (width + near) / groups, weight + sums * width + after))
    of_norm = max(moment.total(1) for moment in cost_of(norm, stream).moments)  # and its input's gradient
    moments.append(Moment({}, beside, weight + gathered * of_norm))
    return Step(keeps, 0.0, again=moments)


def _with_whole_angles(step: Step, groups: int) -> Step:
    """Return a step whose tables of rotary angles, once divided, are whole."""
    return replace(step, keeps={key: size * (groups if key == ANGLES else 1) for key, size in step.keeps.items()})


def _neighbours(model: ModelConfig, local: Sequence[Step], q: float, width: float) -> float:
    """Return the bytes of the groups before and after the one that is computed.

    local: the steps before the exchange. Times the number of groups, as they are.
    """
    cp, levels = model.context_parallel_size, model.hierarchical_context_parallel_sizes
    ranks = {size for each in known_transports(model.transports) for size in each.head_ranks(cp, levels)}
    if not model.overlap_head_groups or max(ranks, default=1) < 2:
        return 0.0
    kept = {key: size for step in local for key, size in step.keeps.items()}
    copies = 2 - 1 / max(ranks)  # received, and the others' parts of what is sent
    on_its_way = sum(kept.values()) + copies * (width + 2 * q)  # also the output and its gradient
    back = sum(kept.values()) + copies * width
    return on_its_way + (back if model.attention_head_groups > 2 else 0.0)
