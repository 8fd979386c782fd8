"""What would work where nothing fits: the fewest GPUs, or the longest sequence. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_cp.config.names import NAME
from megatron_cp.planner.search import Models, Search
from megatron_cp.planner.space import Space, with_settings
from megatron_cp.rules.remedies import Case

_MOST_TIMES = 4096  # so many times the GPUs, or the tokens, are tried
_SHORTEST = 512


def fewest_gpus(case: Case, fixed: Collection[str], node: int, usable: float, models: Models) -> int | None:
    """Return the smallest number of GPUs that a layout fits on: of as many, doubled, or of whole nodes, doubled."""
    start = 1 << max(0, case.world_size - 1).bit_length()
    gpus = start
    while gpus <= _MOST_TIMES * start:
        if _fits(replace(case, world_size=gpus), fixed, node, usable, models):
            return gpus
        gpus *= 2
    return None


def longest_sequence(case: Case, fixed: Collection[str], node: int, usable: float, models: Models) -> int | None:
    """Return the longest sequence that fits, of the next power of two and its halves."""
    length = 1 << max(0, (case.config.model.seq_length or 1) - 1).bit_length()
    while (length := length // 2) >= _SHORTEST:
        shorter = with_settings(case, {NAME.dataset.seq_length: length, NAME.model.seq_length: length})
        if _fits(shorter, fixed, node, usable, models):
            return length
    return None


def _fits(case: Case, fixed: Collection[str], node: int, usable: float, models: Models) -> bool:
    found = Search(Space(case, fixed, node), usable, models).smallest()
    return found is not None and found.memory.total <= usable
