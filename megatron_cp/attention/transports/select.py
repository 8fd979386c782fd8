"""``cp_comm_type: auto``: the transports that a layout can use. Pure.

:mod:`megatron_cp.rules.resolve` chooses the fastest by the time model. With ``h`` query and ``kv`` key/value heads on
a tensor-parallel rank, an all-to-all group must divide ``h`` and ``kv``. With our own attention it may also be a
multiple of ``kv``; Transformer Engine refuses that, and odd numbers of heads. The registry has the other restrictions.
Transports with the needed features in every version are preferred to those with the features in some. A packed
microbatch's group has one level in Transformer Engine, so an all-to-all must fit the groups of all packs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_cp.attention.modules.te_support import MINIMUM, has
from megatron_cp.attention.transports.registry import RING, TRANSPORTS, Transport

Choice = tuple[str, list[int] | None]  # cp_comm_type and hierarchical_context_parallel_sizes
_VERSIONS = (MINIMUM, "999")  # of Transformer Engine: features of all versions, then of any


def choices(cp: int, transports: Collection[Transport] = tuple(TRANSPORTS.values())) -> Iterator[Choice]:
    """Yield the transports of ``cp`` ranks.

    Hierarchical ones come with every pair of level sizes, largest first.
    """
    for transport in transports:
        if not transport.hierarchical:
            yield transport.name, None
            continue
        yield from ((transport.name, [size, cp // size]) for size in range(cp // 2, 1, -1) if cp % size == 0)


def possible_transports(
    heads: int,
    kv_heads: int,
    tp: int,
    cp: int,
    *,
    window: bool = False,
    softmax_offset: bool = False,
    transformer_engine: bool = False,
    packed_sizes: Collection[int] = (),
) -> tuple[list[Choice], str]:
    """Return the possible choices in order of preference, and what restricts them.

    ``heads`` and ``kv_heads`` are the model's; ``tp`` and ``cp`` the group sizes. With ``transformer_engine`` its
    restrictions apply, to windows, offsets and packs, whose groups have the sizes ``packed_sizes``. Raises ValueError
    for invalid numbers, or if no transport is possible.
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "tp": tp, "cp": cp}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if heads % tp:
        raise ValueError(f"heads={heads} is not divisible by tp={tp}")
    if cp == 1:
        return [(RING.name, None)], "one context-parallel rank: no exchange"
    h, kv = heads // tp, max(1, kv_heads // tp)
    packed = packed_sizes if transformer_engine else ()

    def fits(size: int) -> bool:
        if transformer_engine:
            return h % 2 == kv % 2 == h % size == kv % size == 0
        return h % size == 0 and (kv % size == 0 or size % kv == 0)

    asked = {"window": window, "softmax_offset": softmax_offset, "packs": bool(packed_sizes)}
    needed = [feature for feature, wanted in asked.items() if wanted]
    able = [sorted((each for each in TRANSPORTS.values() if each.auto is not None), key=lambda each: each.auto or 0)]
    restricted = ""
    if transformer_engine:
        considered, features = able[0], ("context_parallelism", *needed)
        able = [[t for t in considered if all(has(v, getattr(t.te_since, f)) for f in features)] for v in _VERSIONS]
        if able[0] != considered:
            words = " and ".join(f"{feature.removesuffix('s').replace('_', ' ')}s" for feature in needed)
            having = " or ".join(each.name for each in able[0] or able[-1])
            restricted = f"Transformer Engine has {words or 'context parallelism'} with {having} only"
    for candidates in able:
        found = [
            (name, levels)
            for name, levels in choices(cp, candidates)
            if all(map(fits, TRANSPORTS[name].head_ranks(cp, levels, packed)))
        ]
        if found:
            return found, restricted
    raise ValueError(f"{restricted or 'no transport fits'}, but cp={cp} does not divide {h}/{kv} heads")
