"""The layer pattern of a hybrid model: M is Mamba, * attention, - an MLP, E experts; | may part pipeline stages. Pure.

megatron-core's syntax, of which the letters above are built here.
"""

from __future__ import annotations

LETTERS = "M*-E"


def layers_of(pattern: str | None) -> str:
    """The pattern's layers, one letter each, without the marks between pipeline stages."""
    return (pattern or "").replace("|", "")


def with_stages(pattern: str, stages: int) -> str:
    """The pattern with its pipeline stages marked: as given, else of as many layers each.

    ``stages`` counts virtual ones too; stage i is virtual stage i // pp of pipeline rank i % pp.

    Raises:
        ValueError: the pattern marks another number of stages, or its layers do not divide.
    """
    if "|" not in pattern:
        if len(pattern) % stages:
            raise ValueError(f"the {len(pattern)} layers of {pattern!r} do not divide over {stages} pipeline stages")
        size = len(pattern) // stages
        return "|".join(pattern[start : start + size] for start in range(0, len(pattern), size))
    marked = pattern.split("|")
    if stages == 1:
        return layers_of(pattern)
    if len(marked) != stages or not all(marked):
        raise ValueError(f"{pattern!r} marks {len(marked)} pipeline stages, and {stages} are to have layers")
    return pattern
