"""Ranks of a context-parallel attention, and the parameters of one call.

A :class:`CPContext` is built and checked when a layer is built (or a group changes), and passed down; code below does
not look up groups. An :class:`AttentionCall` has the sequences, mask and scale of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_cp.attention.placement.layout import AnyLayout
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.attention.transports.registry import HEADS, KEYS, RING, Transport, transport_named
from megatron_cp.parallel.collectives import gather_objects

GroupOrPair = dist.ProcessGroup | Sequence[dist.ProcessGroup]


@dataclass(frozen=True)
class CPContext:
    """A transport and its ranks.

    ``a2a_peers`` exchange sequence shards for heads (all-to-all). Keys and values travel among ``p2p_peers`` (ring or
    all-gather). A level that the transport does not use has a single rank. Neighbouring ranks form a group of
    ``a2a_peers``, so the zigzag shard is number ``p2p_peers.rank * a2a_peers.size + a2a_peers.rank``.
    """

    comm_type: str
    a2a_peers: Peers
    p2p_peers: Peers

    @property
    def transport(self) -> Transport:
        return transport_named(self.comm_type)

    @property
    def peers(self) -> tuple[Peers, ...]:
        """Ranks of each of the transport's levels."""
        return tuple(self.a2a_peers if level == HEADS else self.p2p_peers for level in self.transport.levels)

    @property
    def size(self) -> int:
        return self.a2a_peers.size * self.p2p_peers.size

    @property
    def rank(self) -> int:
        return self.p2p_peers.rank * self.a2a_peers.size + self.a2a_peers.rank

    @classmethod
    def alone(cls, comm_type: str = RING.name) -> CPContext:
        """Build the context of a single rank, which holds whole sequences."""
        return cls(transport_named(comm_type).name, Peers.alone(), Peers.alone())

    @classmethod
    def build(cls, comm_type: str, group: GroupOrPair) -> CPContext:
        """Check that ``group`` fits ``comm_type``: one group, or one for each level.

        Raises ValueError for an unknown transport, a missing group, a wrong number of groups, or a group without this
        process. A missing group never means "no communication".
        """
        transport = transport_named(comm_type)
        if transport.hierarchical:
            return cls(comm_type, *_pair(group, transport))
        if isinstance(group, Sequence):
            raise ValueError(f"group: comm_type {comm_type!r} takes one process group, got {len(group)}")
        peers = _peers(group, "group")
        return cls(comm_type, *(peers if level in transport.levels else Peers.alone() for level in (HEADS, KEYS)))

    def check_consistency(self, facts: dict[str, Any]) -> None:
        """Raise ValueError on all ranks if ``facts`` differ between ranks."""
        gathered = [(self.rank, facts)]
        for peers in (self.a2a_peers, self.p2p_peers):
            if peers.size > 1:
                gathered = [entry for part in gather_objects(gathered, peers.group) for entry in part]
        (first, expected), *others = sorted(gathered, key=lambda entry: entry[0])
        for rank, theirs in others:
            for name, value in expected.items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"{name} differs between ranks of {self}: {value} on rank {first}, {theirs.get(name)} on {rank}"
                    )

    def __str__(self) -> str:
        if not self.transport.hierarchical:
            return f"{self.comm_type} over {self.peers[0]}"
        levels = zip(self.transport.levels, self.peers, strict=True)
        return f"{self.comm_type} over {' and '.join(f'{level} {peers}' for level, peers in levels)}"


@dataclass
class SavedResult:
    """Result of a call's kernels, for a second call that has a backward pass only.

    A call without ``out`` sets ``lse``, the log-sum-exp of all keys in the transport's own order. A call with both
    starts no kernel, and returns ``out`` [s, b, heads, d]. So a caller may drop queries, keys and values after the
    forward pass, and compute them again, but not attention.
    """

    lse: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Parameters of one call: sequences over all ranks, mask, and scale of the scores.

    ``transformer_engine``: its kernels may compute it. ``max_logits`` [heads]: raised to each head's largest score of
    the pairs that this rank computes. ``saved``: set in a first call, or used in a second one.
    """

    layout: AnyLayout
    mask: Mask
    scale: float
    deterministic: bool = False
    transformer_engine: bool = False
    max_logits: Tensor | None = field(default=None, compare=False)
    saved: SavedResult | None = field(default=None, compare=False)

    @property
    def known(self) -> tuple[Tensor, Tensor] | None:
        """Output and log-sum-exp of an earlier call.

        The output is a view. As a result of this call it would refer to the call, which refers to it.
        """
        if self.saved is None or self.saved.out is None or self.saved.lse is None:
            return None
        return self.saved.out.view_as(self.saved.out), self.saved.lse

    def keep(self, lse: Tensor) -> None:
        """Set the log-sum-exp for a second call, if one was announced."""
        if self.saved is not None:
            self.saved.lse = lse

    def real_rows(self, rank: int) -> list[slice]:
        """Return the rows of ``rank`` that hold tokens, not padding."""
        return [slice(span.row, span.row + span.length) for span in self.layout.spans(rank)]


def _pair(groups: GroupOrPair, transport: Transport) -> tuple[Peers, Peers]:
    first, second = transport.levels
    if not isinstance(groups, Sequence) or len(groups) != 2:
        got = "one process group" if isinstance(groups, dist.ProcessGroup) else repr(groups)
        raise ValueError(
            f"group: comm_type {transport.name!r} takes two process groups ({first}_group, {second}_group), got {got}"
        )
    heads, ring = _peers(groups[0], f"group[0] ({first})"), _peers(groups[1], f"group[1] ({second})")
    if heads.group is not None and ring.group is not None:
        shared = set(dist.get_process_group_ranks(heads.group)) & set(dist.get_process_group_ranks(ring.group))
        if shared != {dist.get_rank()}:
            raise ValueError(
                f"group: the {first} group ({heads}) and the {second} group ({ring}) must have exactly rank "
                f"{dist.get_rank()} in common, but share {sorted(shared)}"
            )
    return heads, ring


def _peers(group: dist.ProcessGroup, name: str) -> Peers:
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{name} is {group!r}, not a process group: without one every rank would attend to its own tokens only"
        )
    peers = Peers.of(group)
    if peers.rank < 0:
        raise ValueError(f"{name}: rank {dist.get_rank()} is not a member of the group of {peers.size} it was given")
    return peers
