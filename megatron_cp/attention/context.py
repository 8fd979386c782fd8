"""Who takes part in a context-parallel attention, decided once, and what is to be computed.

A :class:`CPContext` is built when a layer is built (or a group changes), checked there, and passed down; nothing below
looks for groups again. A :class:`AttentionCall` says which sequences, mask and scale one call has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_cp.attention.sharding import Layout
from megatron_cp.attention.tiles import Mask
from megatron_cp.attention.transports.comm import Peers
from megatron_cp.config.run_config import CP_COMM_TYPES
from megatron_cp.parallel.collectives import gather_objects

GroupOrPair = dist.ProcessGroup | Sequence[dist.ProcessGroup]


@dataclass(frozen=True)
class CPContext:
    """A transport and its ranks.

    ``heads`` are the ranks that exchange sequence for heads (all-to-all), ``ring`` those among which keys and values
    travel (ring or all-gather); either is one rank where the transport has no such level. Neighbouring ranks form a
    ``heads`` group: the rank in the whole, which decides the zigzag shard, is ``ring.rank * heads.size + heads.rank``.
    """

    comm_type: str
    heads: Peers
    ring: Peers

    @property
    def size(self) -> int:
        return self.heads.size * self.ring.size

    @property
    def rank(self) -> int:
        return self.ring.rank * self.heads.size + self.heads.rank

    @classmethod
    def alone(cls, comm_type: str = "p2p") -> CPContext:
        """One rank, which holds whole sequences and talks to nobody."""
        return cls(_known(comm_type), Peers.alone(), Peers.alone())

    @classmethod
    def build(cls, comm_type: str, group: GroupOrPair) -> CPContext:
        """Check that ``group`` is what ``comm_type`` needs: a process group, or (a2a, p2p) groups for ``a2a+p2p``.

        Raises ValueError for an unknown transport, a missing group, a wrong number of groups, or a group that this
        process is not in. A missing group never means "no communication".
        """
        _known(comm_type)
        if comm_type == "a2a+p2p":
            return cls(comm_type, *_pair(group))
        if isinstance(group, Sequence):
            raise ValueError(f"group: comm_type {comm_type!r} takes one process group, got {len(group)}")
        peers = _peers(group, "group")
        if comm_type == "a2a":
            return cls(comm_type, peers, Peers.alone())
        return cls(comm_type, Peers.alone(), peers)

    def check_agreement(self, facts: dict[str, Any]) -> None:
        """Raise, on all ranks, ValueError if ``facts`` (the same names everywhere) differ between ranks."""
        everyone = [(self.rank, facts)]
        for peers in (self.heads, self.ring):
            if peers.size > 1:
                everyone = [entry for part in gather_objects(everyone, peers.group) for entry in part]
        (first, expected), *others = sorted(everyone, key=lambda entry: entry[0])
        for rank, theirs in others:
            for name, value in expected.items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"{name} differs between ranks of {self}: {value} on rank {first}, {theirs.get(name)} on {rank}"
                    )

    def __str__(self) -> str:
        if self.comm_type == "a2a+p2p":
            return f"a2a+p2p over a2a {self.heads} and p2p {self.ring}"
        return f"{self.comm_type} over {self.heads if self.comm_type == 'a2a' else self.ring}"


@dataclass(frozen=True)
class AttentionCall:
    """What one call computes: the sequences over all ranks, who sees whom, and the factor on the scores.

    ``transformer_engine``: its kernels may compute it.
    """

    layout: Layout
    mask: Mask
    scale: float
    deterministic: bool = False
    transformer_engine: bool = False

    def real_rows(self, rank: int) -> list[slice]:
        """The rows of ``rank`` that hold tokens, not padding."""
        return [slice(span.row, span.row + span.length) for span in self.layout.spans(rank)]


def _known(comm_type: str) -> str:
    if comm_type not in CP_COMM_TYPES:
        raise ValueError(f"comm_type {comm_type!r} is unknown; choose one of {', '.join(CP_COMM_TYPES)}")
    return comm_type


def _pair(groups: GroupOrPair) -> tuple[Peers, Peers]:
    if not isinstance(groups, Sequence) or len(groups) != 2:
        got = "one process group" if isinstance(groups, dist.ProcessGroup) else repr(groups)
        raise ValueError(f"group: comm_type 'a2a+p2p' takes two process groups (a2a_group, p2p_group), got {got}")
    heads, ring = _peers(groups[0], "group[0] (a2a)"), _peers(groups[1], "group[1] (p2p)")
    if heads.group is not None and ring.group is not None:
        shared = set(dist.get_process_group_ranks(heads.group)) & set(dist.get_process_group_ranks(ring.group))
        if shared != {dist.get_rank()}:
            raise ValueError(
                f"group: the a2a group ({heads}) and the p2p group ({ring}) must have exactly rank "
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
