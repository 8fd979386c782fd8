"""The layer pattern of a hybrid model: M is Mamba, * attention, - an MLP, E experts; | may part pipeline stages. Pure.

megatron-core's syntax, of which the letters above are built here. After the model's own layers each depth of
multi-token prediction has its own, behind a /: ``M*M-/*-/*-`` predicts two tokens further.
"""

from __future__ import annotations

LETTERS = "M*-E"


def layers_of(pattern: str | None) -> str:
    """The layers of the model itself, one letter each, without the marks between pipeline stages."""
    return (pattern or "").split("/")[0].replace("|", "")


def ahead_of(pattern: str | None) -> list[str]:
    """The layers of each depth of multi-token prediction."""
    return (pattern or "").split("/")[1:]


def without_stages(pattern: str | None) -> str:
    """All layers of a pattern, wherever its pipeline stages begin."""
    return (pattern or "").replace("|", "")


def with_stages(pattern: str, stages: int) -> str:
    """The pattern with its pipeline stages marked: as given, else of as many layers each.

    ``stages`` counts virtual ones too; stage i is virtual stage i // pp of pipeline rank i % pp. The layers of
    multi-token prediction are the last stage's.

    Raises:
        ValueError: the pattern has no layers, marks another number of stages, or its layers do not divide.
    """
    if not layers_of(pattern):
        raise ValueError(f"a hybrid model needs layers, and its pattern is {pattern!r}")
    if stages == 1:
        return without_stages(pattern)
    main, *ahead = pattern.split("/")
    if "|" not in main:
        if len(main) % stages:
            raise ValueError(f"the {len(main)} layers of {main!r} do not divide over {stages} pipeline stages")
        size = len(main) // stages
        main = "|".join(main[start : start + size] for start in range(0, len(main), size))
    marked = main.split("|")
    if len(marked) != stages or not all(marked):
        raise ValueError(f"{main!r} marks {len(marked)} pipeline stages, and {stages} are to have layers")
    return "/".join([main, *ahead])
