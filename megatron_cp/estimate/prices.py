"""The cost model of dynamic CP, derived from the time model. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_cp.attention.transports.registry import cost_transport, known_transports
from megatron_cp.dynamic_cp.cost import CostModel
from megatron_cp.estimate.device import Device
from megatron_cp.estimate.flops import numbered_layer_types
from megatron_cp.estimate.job import Job
from megatron_cp.estimate.time import microbatch_seconds

_HALVINGS = 8  # lengths of the fit: the longest, half of it, and so on; shorter samples have little attention


def prices(job: Job, longest: int, device: Device, gpus_per_node: int | None = None) -> CostModel:
    """Fit a scheduler's cost model to the time of packed microbatches.

    Each pack of the fit has equal samples, and as many tokens as the longest sample. Sliding windows are neither linear
    nor quadratic: the fit has the least squared relative error over the lengths.

    Args:
        longest: tokens of the longest sample, or of a full pack if that is more.
    """
    longest, node = max(2, longest), gpus_per_node or device.gpus_per_node
    # Without launches, the time of a pack is linear in the tokens. With them it has a lower limit.
    quick = replace(device, launch_seconds=0.0)
    lengths = [max(1, longest >> halvings) for halvings in range(_HALVINGS)]
    packs = [(length,) * (longest // length) for length in lengths]
    seconds = [_seconds(job, pack, quick, node) for pack in packs]
    short = packs[-1]
    part = short[::2]
    slope = (seconds[-1] - _seconds(job, part, quick, node)) / (len(short) - len(part))
    fixed = max(0.0, seconds[-1] - slope * len(short))
    per_token = [(each - fixed) / sum(pack) for each, pack in zip(seconds, packs, strict=True)]
    quadratic, linear = _line(np.array(lengths) + device.attention_half, np.array(per_token))
    transports = known_transports(job.model.transports)
    attending = sum("*" in parts for _, parts in numbered_layer_types(job.model))
    model = CostModel(
        per_microbatch=fixed + max(0.0, _seconds(job, short, device, node) - seconds[-1]),
        quadratic=quadratic,
        linear=linear,
        small_tile=device.attention_half,
        overlap=device.overlap["cp"] if all(each.hops or each.hierarchical for each in transports) else 0.0,
        ranks_per_node=max(1, node // job.layout.tp),
        transport=cost_transport(job.model.transports),
        per_sample=device.call_seconds * attending / job.layout.pp,
        placement=job.model.packed_placement,
    )
    inside, step = _messages(job, longest, 2, model, device, node)
    across, _ = _messages(job, longest, 2 * model.ranks_per_node, model, device, node)
    return replace(model, kv_intra=inside, kv_inter=across, ring_step=step)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the slope and intercept of least relative error, both at least 0."""
    slope, start = np.linalg.lstsq(np.stack([x / y, 1 / y], axis=1), np.ones(len(y)), rcond=None)[0].tolist()
    if slope < 0:
        return 0.0, float((1 / y).sum() / (1 / y**2).sum())
    if start < 0:
        return float((x / y).sum() / ((x / y) ** 2).sum()), 0.0
    return slope, start


def _messages(
    job: Job, tokens: int, size: int, model: CostModel, device: Device, gpus_per_node: int
) -> tuple[float, float]:
    """Return the cost of messages in a group of ``size`` ranks, without overlap.

    Returns:
        Seconds per token to move keys and values once around the group; seconds of latency per step.
    """
    exposed = replace(device, overlap={**device.overlap, "cp": 0.0})
    layout = replace(job.layout, world_size=job.layout.world_size * size, cp=size, hierarchical=None)
    few, many = (
        microbatch_seconds(replace(job, layout=layout, lengths=(tokens * size * times,)), exposed, gpus_per_node)[1]
        for times in (1, 2)
    )
    moved = tokens * (size - 1) / (size if model.messages.by_heads else 1)
    return max(0.0, many - few) / moved, max(0.0, 2 * few - many) / (size - 1 if model.messages.hops else 1)


def _seconds(job: Job, lengths: tuple[int, ...], device: Device, gpus_per_node: int) -> float:
    """Return the seconds of a pack on one rank."""
    alone = replace(job.layout, cp=1, hierarchical=None)
    return microbatch_seconds(replace(job, layout=alone, lengths=lengths), device, gpus_per_node)[0]
