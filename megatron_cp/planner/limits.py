"""What would work where nothing fits: the fewest GPUs, or the longest sequence. Pure."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.config.names import NAME
from megatron_cp.planner.found import Models
from megatron_cp.planner.search import Search
from megatron_cp.planner.space import Space, with_settings
from megatron_cp.rules.memory import gib

_MOST_TIMES = 4096  # so many times the GPUs, or the tokens, are tried
_SHORTEST = 512


def impossible(space: Space, usable: float, models: Models, gpu: str) -> str:
    """Return why nothing fits, and the smallest number of GPUs or the longest sequence that would work."""
    search = Search(space, usable, models)
    smallest, what = search.smallest(), f"--gpus {space.case.world_size}: "
    if smallest is not None:
        need = gib(smallest.memory.total)
        what += f"nothing fits {gib(usable)} GiB of an {gpu}; the smallest layout needs {need} GiB a GPU"
    elif search.refused:
        what += f"the rules refuse all layouts, one of them as {search.refused.message}"
    else:
        what += "no layout divides the model, the batch and the sequence over so many"
    fixes = []
    if gpus := fewest_gpus(space, usable, models):
        fixes.append(f"--gpus {gpus}")
    if length := longest_sequence(space, usable, models):
        fixes.append(f"--seq-length {length}")
    return f"{what}. Fix: {', or '.join(fixes) or 'leave out settings, so that more is searched'}"


def fewest_gpus(space: Space, usable: float, models: Models) -> int | None:
    """Return the smallest number of GPUs that a layout fits on: of as many, doubled, or of whole nodes, doubled."""
    case = space.case
    start = 1 << max(0, case.world_size - 1).bit_length()
    gpus = start
    while gpus <= _MOST_TIMES * start:
        if _fits(replace(space, case=replace(case, world_size=gpus)), usable, models):
            return gpus
        gpus *= 2
    return None


def longest_sequence(space: Space, usable: float, models: Models) -> int | None:
    """Return the longest sequence that fits, of the next power of two and its halves."""
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
