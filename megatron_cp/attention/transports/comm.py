"""Exchanges of context parallelism: ring hop, all-to-all and gather.

Each starts at once and returns a :class:`PendingReceive`. gloo blocks forever in a second wait on a receive, so
``wait`` waits once. A :class:`PendingReceive` keeps the sent tensors alive until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Tags of messages between two ranks that may overlap. A hop uses its tag and the next, an exchange those of its index.
KV_TAG, GRAD_TAG, EXCHANGE_TAG = 10, 20, 30
TAGS_OF_EXCHANGE = 10  # an exchange of heads has up to five tensors, each in two parts


@dataclass(frozen=True)
class Peers:
    """Ranks of an exchange; a group of None is a single rank."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Peers:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @classmethod
    def alone(cls) -> Peers:
        return cls(None, 0, 1)

    def __str__(self) -> str:
        return "one rank" if self.group is None else f"ranks {dist.get_process_group_ranks(self.group)}"


class PendingReceive[T]:
    """Receives in progress, with tensors that must stay unchanged until then."""

    def __init__(self, content: T, works: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        self._content = content
        self._works = list(works)
        self._keep = tuple(keep)

    def wait(self) -> T:
        """Wait for the content; sent tensors may be reused afterwards."""
        for work in self._works:
            work.wait()
        self._works, self._keep = [], ()
        return self._content


def hop(pair: tuple[Tensor, Tensor], distance: int, peers: Peers, tag: int) -> PendingReceive[tuple[Tensor, Tensor]]:
    """Send two tensors ``distance`` ranks ahead, and receive two from behind."""
    to, source = (peers.rank + distance) % peers.size, (peers.rank - distance) % peers.size
    sent = pair[0].contiguous(), pair[1].contiguous()
    arriving = torch.empty_like(sent[0]), torch.empty_like(sent[1])
    operations = []
    for index, (outgoing, incoming) in enumerate(zip(sent, arriving, strict=True)):
        operations.append(dist.P2POp(dist.isend, outgoing, group=peers.group, tag=tag + index, group_peer=to))
        operations.append(dist.P2POp(dist.irecv, incoming, group=peers.group, tag=tag + index, group_peer=source))
    return PendingReceive(arriving, dist.batch_isend_irecv(operations), keep=sent)


def exchange[T](
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], content: T, peers: Peers, index: int
) -> PendingReceive[T]:
    """Send ``outgoing[r]`` to each rank r, and fill ``incoming[r]``.

    Each has up to ten tensors, as many as the other rank expects. An all-to-all without buffers, whose parts may lie
    anywhere. All are one launch on a GPU. Overlapping exchanges need different ``index``.
    """
    operations, sent, first = [], [], EXCHANGE_TAG + TAGS_OF_EXCHANGE * index
    others = [rank for rank in range(peers.size) if rank != peers.rank]
    for rank in others:
        for tag, part in enumerate(outgoing[rank], first):
            sent.append(part.contiguous())
            operations.append(dist.P2POp(dist.isend, sent[-1], group=peers.group, tag=tag, group_peer=rank))
        for tag, part in enumerate(incoming[rank], first):
            operations.append(dist.P2POp(dist.irecv, part, group=peers.group, tag=tag, group_peer=rank))
    return PendingReceive(content, dist.batch_isend_irecv(operations) if operations else [], keep=sent)


def all_gather[T](
    pieces: Sequence[Tensor], outs: Sequence[Tensor], content: T, peers: Peers, index: int
) -> PendingReceive[T]:
    """Gather one or two tensors ``pieces[i]`` of every rank into ``outs[i]``, by rank.

    Shapes: [rows, ...] and [size * rows, ...]. ``content`` and ``index`` as for :func:`exchange`.
    """
    sent = [piece.contiguous() for piece in pieces]
    if sent[0].device.type != "cpu":
        works = [
            dist.all_gather_into_tensor(out, piece, group=peers.group, async_op=True)
            for out, piece in zip(outs, sent, strict=True)
        ]
        return PendingReceive(content, works, keep=sent)
    # gloo's all-gather would join everything in a buffer of its own and copy from there.
    slots = [out.unflatten(0, (peers.size, -1)) for out in outs]
    incoming = [[slot[rank] for slot in slots] for rank in range(peers.size)]
    arrival = exchange([sent] * peers.size, incoming, content, peers, index)
    for slot, piece in zip(incoming[peers.rank], sent, strict=True):
        slot.copy_(piece)
    return arrival
