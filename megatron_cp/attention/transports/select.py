"""``cp_comm_type: auto``: select a transport, and say why. Pure.

The first registered transport, in order of preference, that fits. With ``h`` query and ``kv`` key/value heads on a
tensor-parallel rank, and room for ``gpus_per_node / tp`` neighbouring context-parallel ranks in a node:

1. ``a2a`` if all ranks are in one node and their number divides ``h`` and ``kv``. The bytes a rank fall with the number
   of ranks, the links are fast, and every kernel gets a whole sequence.
2. ``a2a+p2p`` with the largest all-to-all group that stays in a node and divides ``h``, ``kv`` and the number of ranks,
   if there is one larger than 1. Only the ring crosses nodes, with that much less to carry.
3. ``p2p`` if a rank's tokens are enough to hide a hop behind compute (or their number is unknown).
4. ``all_gather``: one exchange instead of many exposed ones.

With our own attention an all-to-all group may be a multiple of ``kv``; Transformer Engine refuses that, and odd numbers
of heads. The registry has the other restrictions: a transport with the needed features in every version is preferred to
one with the features in some. A packed microbatch's group has one level in Transformer Engine, so an all-to-all must
fit the groups of all packs. If nothing fits, the fallback is an exposed ring, then an all-to-all across nodes.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_cp.attention.modules.te_support import MINIMUM, has
from megatron_cp.attention.transports.registry import RING, TRANSPORTS, Transport

# A ring hop is hidden if local tokens >= 2 * (kv / h) * FLOP/s / (bytes/s): here H100 attention (600 TFLOP/s) with
# NVLink 4 (350 GB/s within a node) and NDR InfiniBand (45 GB/s between nodes).
_TOKENS_PER_HEAD_RATIO = {"node": 3400, "network": 26700}
_VERSIONS = (MINIMUM, "999")  # of Transformer Engine: features of all versions, then of any


def select_transport(
    heads: int,
    kv_heads: int,
    tp: int,
    cp: int,
    gpus_per_node: int,
    *,
    seq_length: int | None = None,
    window: bool = False,
    softmax_offset: bool = False,
    transformer_engine: bool = False,
    packed_sizes: Collection[int] = (),
) -> tuple[str, list[int] | None, str]:
    """Choose ``(cp_comm_type, hierarchical_context_parallel_sizes or None, reason)``.

    ``heads`` and ``kv_heads`` are the model's; ``tp`` and ``cp`` the group sizes. ``seq_length`` (whole sequence)
    decides whether a ring is hidden. With ``transformer_engine`` its restrictions apply, to windows, offsets and packs,
    whose groups have the sizes ``packed_sizes``. Raises ValueError for invalid numbers, or if no transport fits.
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "tp": tp, "cp": cp, "gpus_per_node": gpus_per_node}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if heads % tp:
        raise ValueError(f"heads={heads} is not divisible by tp={tp}")
    if cp == 1:
        return RING.name, None, "one context-parallel rank: no exchange"
    h, kv, room = heads // tp, max(1, kv_heads // tp), max(1, gpus_per_node // tp)
    groups = {cp, *packed_sizes} if transformer_engine else {cp}
    enough = _TOKENS_PER_HEAD_RATIO["node" if cp <= room else "network"] * kv // h
    no_group = f"no all-to-all group in a node (room for {room}) can be used with {h}/{kv} heads and cp={cp}"

    def fits(size: int) -> bool:
        if transformer_engine:
            return h % 2 == kv % 2 == h % size == kv % size == 0
        return h % size == 0 and (kv % size == 0 or size % kv == 0)

    def offer(transport: Transport) -> tuple[int, list[int] | None, str] | None:
        """Return penalty (0: fits well), sizes and reason; None if it cannot be used."""
        if transport.hierarchical:
            levels = [size for size in range(2, min(room, cp - 1) + 1) if cp % size == 0 and fits(size)]
            if not levels:
                return None
            why = f"{levels[-1]} is the largest all-to-all group that stays in a node (room for {room}) and divides"
            ring = cp // levels[-1]
            return 0, [levels[-1], ring], f"{why} {h}/{kv} heads and cp={cp}; the ring of {ring} carries the rest"
        if transport.exchanges_heads:
            where = "in" if max(groups) <= room else "beyond"
            why = f"groups of {', '.join(map(str, sorted(groups)))} ranks, {where} a node (room for {room}), divide"
            return (2 * (where == "beyond"), None, f"{why} {h}/{kv} heads") if all(map(fits, groups)) else None
        if transport.hops:
            exposed = seq_length is not None and seq_length // cp < enough
            return int(exposed), None, f"{no_group}; the ring is hidden, as estimated, from {enough} tokens a rank on"
        return 0, None, f"{no_group}; one exchange, where a ring's hops take {enough} tokens a rank to hide"

    asked = {"window": window, "softmax_offset": softmax_offset, "packs": bool(packed_sizes)}
    needed = [feature for feature, wanted in asked.items() if wanted]
    able = [sorted((each for each in TRANSPORTS.values() if each.auto is not None), key=lambda each: each.auto or 0)]
    restricted = ""
    if transformer_engine:
        considered, features = able[0], ("context_parallelism", *needed)
        able = [[t for t in considered if all(has(v, getattr(t.te_since, f)) for f in features)] for v in _VERSIONS]
        if able[0] != considered:
            words = " and ".join(f"{feature.removesuffix('s').replace('_', ' ')}s" for feature in needed)
            having = " or ".join(each.name for each in able[-1])
            restricted = f"Transformer Engine has {words or 'context parallelism'} with {having} only"
    for candidates in able:
        offers = [(*found, each.name) for each in candidates if (found := offer(each)) is not None]
        if offers:
            _, levels, reason, name = min(offers, key=lambda found: found[0])
            return name, levels, "; ".join(filter(None, (reason, restricted)))
    raise ValueError(f"{restricted or 'no transport fits'}, but cp={cp} does not divide {h}/{kv} heads")
