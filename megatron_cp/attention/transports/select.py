"""``cp_comm_type: auto``: which transport fits a layout. Pure arithmetic, with its reason in words.

The rules, in order (per tensor-parallel rank, ``h`` query and ``kv`` key/value heads; a node has room for
``gpus_per_node / tp`` neighbouring context-parallel ranks):

1. One rank: nothing to choose.
2. All ranks in one node, and their number divides ``h`` and ``kv``: ``a2a``. Its bytes per rank fall with the number
   of ranks, they go over the fast links, and every kernel sees a whole sequence.
3. More ranks than that: ``a2a+p2p`` with the largest all-to-all group that stays in a node and divides ``h``, ``kv``
   and the number of ranks, if there is one larger than 1. Only the ring crosses nodes, with that much less to carry.
4. Otherwise ``p2p``, if a rank's tokens are enough to hide a hop behind compute (or their number is unknown).
5. Otherwise ``all_gather``: one exchange instead of many exposed ones.

With our own attention an all-to-all group may be larger than ``kv`` where that divides evenly; Transformer Engine
refuses that, odd numbers of heads, and windows or softmax offsets on a ring. To Transformer Engine a packed
microbatch's group has one level: there ``a2a`` must fit the groups of all packs, and the rest is ``p2p``, which takes
packs in every version.
"""

from __future__ import annotations

from collections.abc import Collection

# A ring hop is hidden when local tokens >= 2 * (kv / h) * FLOP/s / (bytes/s): here H100 attention (600 TFLOP/s) with
# NVLink 4 (350 GB/s within a node) and NDR InfiniBand (45 GB/s between nodes). See docs/context_parallel.md.
_TOKENS_PER_HEAD_RATIO = {"node": 3400, "network": 26700}


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
    helps to judge whether a ring is hidden. With ``transformer_engine`` its restrictions hold: no window or softmax
    offset on a ring, no offset on all-gather, no replicated key/value heads, and one level for packs, whose groups have
    the sizes ``packed_sizes``. Raises ValueError for numbers that do not fit or if no transport can do what is asked.
    """
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("tp", tp), ("cp", cp)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node must be at least 1, got {gpus_per_node}")
    if heads % tp:
        raise ValueError(f"heads={heads} is not divisible by tp={tp}")
    if cp == 1:
        return "p2p", None, "one context-parallel rank: nothing is exchanged"
    h, kv = heads // tp, max(1, kv_heads // tp)
    room = max(1, gpus_per_node // tp)
    ring_refused = transformer_engine and (window or softmax_offset)
    groups = {cp, *packed_sizes} if transformer_engine else {cp}
    odd_for_te = transformer_engine and (h % 2 or kv % 2)

    def fits(size: int) -> bool:
        return not odd_for_te and h % size == 0 and (kv % size == 0 or (not transformer_engine and size % kv == 0))

    if max(groups) <= room and all(map(fits, groups)):
        return "a2a", None, f"{cp} ranks fit in a node of {gpus_per_node} GPUs with tp={tp} and divide {h}/{kv} heads"
    levels = [size for size in range(2, min(room, cp - 1) + 1) if cp % size == 0 and fits(size)]
    if levels and not ring_refused and not (transformer_engine and packed_sizes):
        size = levels[-1]
        return (
            "a2a+p2p",
            [size, cp // size],
            f"{size} is the largest all-to-all group that stays in a node (room for {room}) and divides {h}/{kv} heads "
            f"and cp={cp}; the ring of {cp // size} carries the rest",
        )
    if transformer_engine and softmax_offset:
        if all(map(fits, groups)):
            return "a2a", None, "Transformer Engine computes softmax offsets with a2a only"
        raise ValueError(
            f"Transformer Engine computes softmax offsets with a2a only, but cp={cp} does not divide {h}/{kv} heads"
        )
    if ring_refused and packed_sizes and all(map(fits, groups)):
        return "a2a", None, "Transformer Engine has packs with a window on a2a in every version"
    if ring_refused:
        return (
            "all_gather",
            None,
            f"Transformer Engine has no window on a ring, and cp={cp} does not fit {h}/{kv} heads",
        )
    if transformer_engine and packed_sizes:
        return (
            "p2p",
            None,
            f"groups of {sorted(groups)} ranks do not all fit {h}/{kv} heads in a node, and packs have one level",
        )
    link = "node" if cp <= room else "network"
    needed = _TOKENS_PER_HEAD_RATIO[link] * kv // h
    why = f"no all-to-all group in a node (room for {room}) divides {h}/{kv} heads and cp={cp}"
    if seq_length is not None and seq_length // cp < needed:
        return (
            "all_gather",
            None,
            f"{why}; {seq_length // cp} tokens a rank are fewer than the {needed} estimated to hide a hop",
        )
    return "p2p", None, f"{why}; the ring is hidden, as estimated, from {needed} tokens a rank on"
