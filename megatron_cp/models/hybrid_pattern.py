"""Layer pattern of a hybrid model: M Mamba, * attention, - MLP, E experts. Pure.

megatron-core's syntax, limited to these letters. | separates pipeline stages. After the model's layers, each depth of
multi-token prediction has its own layers behind a /: ``M*M-/*-/*-`` predicts two more tokens.
"""

from __future__ import annotations

LETTERS = "M*-E"


def layers_of(pattern: str | None) -> str:
    """Return the model's own layers, one letter each, without stage marks."""
    return (pattern or "").split("/")[0].replace("|", "")


def mtp_layers_of(pattern: str | None) -> list[str]:
    """Return the layers of each depth of multi-token prediction."""
    return (pattern or "").split("/")[1:]


def without_stages(pattern: str | None) -> str:
    """Return a pattern without its stage marks."""
    return (pattern or "").replace("|", "")


def with_stages(pattern: str, stages: int) -> str:
    """Mark the pipeline stages of a pattern.

    ``stages`` counts virtual stages too; stage i is virtual stage i // pp of pipeline rank i % pp. The layers of
    multi-token prediction belong to the last stage.

    Raises:
        ValueError: the pattern has no layers or another number of stages, or does not divide evenly.
    """
    if not layers_of(pattern):
        raise ValueError(f"a hybrid model needs layers; the pattern is {pattern!r}")
    if stages == 1:
        return without_stages(pattern)
    main, *ahead = pattern.split("/")
    if "|" not in main:
        if len(main) % stages:
            raise ValueError(f"the {len(main)} layers of {main!r} are not divisible by {stages} pipeline stages")
        size = len(main) // stages
        main = "|".join(main[start : start + size] for start in range(0, len(main), size))
    marked = main.split("|")
    if len(marked) != stages or not all(marked):
        raise ValueError(f"{main!r} has {len(marked)} pipeline stages; {stages} with layers are required")
    return "/".join([main, *ahead])
