"""Registry of context-parallel transports. Pure: imports no torch.

Rules, cost model, selection, groups, probe, verification, documents and benchmarks read this table; no other code
compares names. A new transport is a module with one function (``run``), and an entry in :data:`TRANSPORTS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from megatron_cp.config.names import NAME
from megatron_cp.parallel.layout import LEVELS

# Task of a level: exchange sequence for heads, or bring keys and values to queries.
HEADS, KEYS = LEVELS
ALWAYS, NEVER = "0", None  # as versions


@dataclass(frozen=True)
class TESince:
    """First versions of Transformer Engine that support a feature with a transport.

    packs_without_waits: packs do not make the host wait for the device. Before 2.18 an all-to-all of a pack reads the
    bounds of each sequence's chunks from the device: for 16 sequences on four ranks about two thousand waits a layer,
    forward and backward.
    """

    context_parallelism: str | None = NEVER
    packs: str | None = NEVER
    packs_without_waits: str | None = ALWAYS
    window: str | None = NEVER
    full_window: str | None = NEVER  # without a causal mask
    full_window_in_packs: str | None = NEVER
    softmax_offset: str | None = NEVER
    softmax_offset_in_packs: str | None = NEVER  # with cuDNN 9.18; torch 2.11 has 9.19
    different_head_dims: str | None = NEVER


@dataclass(frozen=True)
class CostTerms:
    """Message counts of a group of c ranks in the cost model.

    hops: c - 1 messages, hidden behind attention, with kernel calls for each; otherwise one exposed message.
    by_heads: a rank moves 1/c of each token, but also queries and outputs; c must divide the heads.
    """

    hops: bool
    by_heads: bool = False


@dataclass(frozen=True)
class Transport:
    """One way for attention's rows to reach other context-parallel ranks.

    name: the value of ``model.cp_comm_type``.
    run: ``module:function`` of ``(query, key, value, softmax_offset, call, peers)``, with the ranks of :data:`KEYS`
        (one without this level); returns attention over their tokens, [s_local, b, h, d], differentiable.
    levels: levels of the groups, :data:`HEADS`, :data:`KEYS` or both; both require
        ``hierarchical_context_parallel_sizes``. Ranks of :data:`HEADS` exchange sequence for heads around ``run``
        (:mod:`.all_to_all`).
    hops: keys and values come in a message a rank, which needs enough tokens to be hidden behind compute.
    auto: rank of preference for ``cp_comm_type=auto``; None: never chosen.
    in_two_levels: replacement for a packed microbatch whose group has more ranks than divide the heads.
    other_names: names in other projects.
    """

    name: str
    run: str
    levels: tuple[str, ...]
    cost: CostTerms
    te_since: TESince = TESince()
    hops: bool = False
    auto: int | None = None
    in_two_levels: str | None = None
    other_names: tuple[str, ...] = ()

    @property
    def exchanges_heads(self) -> bool:
        return HEADS in self.levels

    @property
    def hierarchical(self) -> bool:
        return len(self.levels) > 1

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides that select this transport."""
        flat = () if self.hierarchical else (f"{NAME.model.hierarchical_context_parallel_sizes}=null",)
        return f"{NAME.model.cp_comm_type}={self.name}", *flat

    def head_ranks(self, cp: int, sizes: Sequence[int] | None, packed: Collection[int] = ()) -> set[int]:
        """Return the numbers of ranks that split the heads, which must divide them.

        Of a group of ``cp`` ranks, of ``sizes``, or of ``packed`` groups. Empty if heads are not split.
        """
        if not self.exchanges_heads:
            return set()
        return {cp, *packed} if not self.hierarchical else {sizes[0]} if sizes else set()


_HERE = "megatron_cp.attention.transports"
_RING = f"{_HERE}.ring:ring_attention"
_HOPS = CostTerms(hops=True)

RING = Transport(
    "p2p",
    run=_RING,
    levels=(KEYS,),
    cost=_HOPS,
    te_since=TESince("1.0.0", packs=ALWAYS, different_head_dims="2.8.0"),
    hops=True,
    auto=3,
    other_names=("ring",),
)
ALL_GATHER = Transport(
    "all_gather",
    run=f"{_HERE}.all_gather:all_gather_attention",
    levels=(KEYS,),
    cost=_HOPS,  # as a ring: the cost of one exposed exchange has not been measured
    # Windows without a causal mask are accepted from 2.12 on, but wrong: the kernel gets the keys from the window's
    # start on, with positions as if they started at the first row's.
    te_since=TESince("1.10.0", packs="2.18.0", window=ALWAYS, different_head_dims="2.15.0"),
    auto=4,
    other_names=("allgather", "ag"),
)
ALL_TO_ALL = Transport(
    "a2a",
    run=_RING,
    levels=(HEADS,),
    cost=CostTerms(hops=False, by_heads=True),
    te_since=TESince(
        "1.10.0",
        packs="2.10.0",
        packs_without_waits="2.18.0",
        window=ALWAYS,
        full_window="2.16.0",
        full_window_in_packs="2.12.0",
        softmax_offset=ALWAYS,
        softmax_offset_in_packs="2.12.0",
        different_head_dims="2.15.0",
    ),
    auto=1,
    in_two_levels="a2a+p2p",
    other_names=("alltoall", "all_to_all", "ulysses"),
)
HIERARCHICAL = Transport(
    "a2a+p2p",
    run=_RING,
    levels=(HEADS, KEYS),
    cost=_HOPS,
    te_since=TESince("1.12.0", packs="2.19.0", different_head_dims="2.8.0"),
    auto=2,
    other_names=("usp", "hybrid", "hierarchical", "hcp", "p2p+a2a"),
)
TRANSPORTS: dict[str, Transport] = {each.name: each for each in (RING, ALL_GATHER, ALL_TO_ALL, HIERARCHICAL)}


def transport_named(name: str) -> Transport:
    """Return a registered transport; raise ValueError for an unknown name."""
    if name not in TRANSPORTS:
        raise ValueError(f"comm_type {name!r} is unknown; choose one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def known_transports(names: Iterable[str]) -> tuple[Transport, ...]:
    """Return the transports of these names; unknown names (also ``auto``) are skipped."""
    return tuple(TRANSPORTS[name] for name in names if name in TRANSPORTS)


def cost_transport(names: Iterable[str]) -> str:
    """Return the transport whose messages the cost model counts.

    The first with the same cost terms; the ring if layers differ.
    """
    terms = {transport.cost for transport in known_transports(names)}
    return next(each.name for each in TRANSPORTS.values() if terms == {each.cost}) if len(terms) == 1 else RING.name
