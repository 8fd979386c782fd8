"""The largest moment of a pipeline stage's chunk. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from megatron_cp.estimate.memory.stages import State
from megatron_cp.estimate.memory.tape import RESIDUAL, Moment, PartCost

Kinds = defaultdict[str, float]  # bytes by kind


class Peak(NamedTuple):
    """What a microbatch adds to all that is kept, at its peak.

    total: bytes. added: the same by kind. place: number of the part.
    """

    total: float
    added: Kinds
    place: int


def peak_of_chunk(
    parts: Sequence[PartCost],
    tokens: float,
    waiting: Sequence[Mapping[str, float]],
    before: Mapping[str, float],
    again: bool,
    received: bool,
) -> Peak:
    """Return the peak of a microbatch's passes through a chunk.

    waiting: bytes of what other parts, microbatches or stages hold while a part's backward pass runs, by kind. before:
    while a forward pass runs. again: the chunk's last pass was a backward pass too, so that experts of
    earlier parts hold what that one has left. received: as for :func:`left_behind`.
    """
    total, most, place, peak = 0.0, -math.inf, 0, parts[0].moments[0]
    output = 0.0  # what experts hold of the gradient of a part's output
    known: dict[int, Moment] = {}
    for number in reversed(range(len(parts))):
        part = parts[number]
        total -= part.size * tokens
        if id(part) in known and not part.leaves:  # the same, with less beside it
            continue
        beside = sum(before.values()), sum(waiting[number].values())
        moment = known.setdefault(id(part), part.worst(tokens, *beside))
        here = total + moment.total(tokens) + beside[not moment.forward]
        if again:
            here += sum(left_behind(parts[:number], received, tokens))
        if here > most:
            most, place, peak = here, number, moment
        total += (part.leaves + output * (not part.frees_output)) * tokens
        output = part.leaves
    added: Kinds = defaultdict(float)
    for part in parts[place:]:
        for kind, size in part.kept.items():
            added[kind] -= size * tokens
    for kind, size in peak.kept.items():
        added[kind] += size * tokens
    added[RESIDUAL] += sum(part.leaves for part in parts[place + 1 :]) * tokens
    waits = sum(after.leaves for part, after in pairwise(parts[place + 1 :]) if not part.frees_output) * tokens
    added["buffers"] += peak.gradients * tokens + peak.weight + waits
    for kind, size in (before if peak.forward else waiting[place]).items():
        added[kind] += size
    for kind, size in zip((RESIDUAL, "buffers"), left_behind(parts[: place * again], received, tokens), strict=True):
        added[kind] += size
    return Peak(most, added, place)


def left_behind(parts: Sequence[PartCost], received: bool, tokens: float) -> tuple[float, float]:
    """Return bytes of inputs and of gradients that experts hold after a backward pass.

    received: another stage has sent the chunk's input, which is counted with what stages exchange.
    """
    if not parts:
        return 0.0, 0.0
    first = parts[0].leaves
    inputs = sum(part.leaves for part in parts)
    gradients = first + sum(after.leaves for part, after in pairwise(parts) if not part.frees_output)
    return (inputs - first * received) * tokens, gradients * tokens


def bytes_of_chunks(state: State, sizes: Sequence[float], left: Sequence[tuple[float, float]]) -> float:
    """Return the bytes of all microbatches under way, with other chunks' experts."""
    held = 0.0
    for number, each in enumerate(left):
        if state.done[number] and number != state.chunk:
            held += sum(each)
    return held + sum(map(mul, state.under_way, sizes))
