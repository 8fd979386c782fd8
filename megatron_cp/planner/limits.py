"""Alternatives if no layout fits: the fewest GPUs, or the longest sequence.

Pure.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.config.names import NAME
from megatron_cp.planner.found import Models
from megatron_cp.planner.search import Search
from megatron_cp.planner.space import Space, with_settings
from megatron_cp.rules.memory import gib

_MOST_TIMES = 4096  # largest factor on the number of GPUs
_SHORTEST = 512  # tokens of the shortest sequence


def impossible(space: Space, usable: float, models: Models, gpu: str) -> str:
    """Return the error message if no layout fits, with GPUs or lengths that work."""
    search = Search(space, usable, models)
    smallest, what = search.smallest(), f"--gpus {space.case.world_size}: "
    if smallest is not None:
        need = gib(smallest.memory.total)
        what += f"no layout fits in {gib(usable)} GiB per {gpu}; the smallest layout needs {need} GiB"
    elif refused := search.refused:
        return f"{what}the rules reject the layouts: {refused.field}: {refused.message}. Fix: {refused.fix}"
    else:
        what += "no layout divides the model, the batch and the sequence by this number of GPUs"
    fixes = []
    if gpus := fewest_gpus(space, usable, models):
        fixes.append(f"--gpus {gpus}")
    if length := longest_sequence(space, usable, models):
        fixes.append(f"--seq-length {length}")
    return f"{what}. Fix: {', or '.join(fixes) or 'remove key=value arguments to search more layouts'}"


def fewest_gpus(space: Space, usable: float, models: Models) -> int | None:
    """Return the smallest number of GPUs with a layout that fits, None if none does.

    Tries powers of two, from the requested number of GPUs upwards.
    """
    case = space.case
    start = 1 << max(0, case.world_size - 1).bit_length()
    gpus = start
    while gpus <= _MOST_TIMES * start:
        if _fits(replace(space, case=replace(case, world_size=gpus)), usable, models):
            return gpus
        gpus *= 2
    return None


def longest_sequence(space: Space, usable: float, models: Models) -> int | None:
    """Return the longest sequence that fits in tokens, None if none does.

    Tries powers of two below the requested length.
    """
    case = space.case
    length = 1 << max(0, (case.config.model.seq_length or 1) - 1).bit_length()
    while (length := length // 2) >= _SHORTEST:
        lengths = space.lengths and tuple(min(each, length) for each in space.lengths)
        shorter = with_settings(case, {NAME.dataset.seq_length: length, NAME.model.seq_length: length})
        if _fits(replace(space, case=shorter, lengths=lengths), usable, models):
            return length
    return None


def _fits(space: Space, usable: float, models: Models) -> bool:
    found = Search(space, usable, models).smallest()
    return found is not None and found.memory.total <= usable
