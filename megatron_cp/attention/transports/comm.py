"""The exchanges of context parallelism: a ring hop, an all-to-all and a gather.

Every exchange starts at once and returns a :class:`PendingReceive`. gloo blocks forever in a second wait on a receive,
so ``wait`` waits once and remembers it. A :class:`PendingReceive` keeps the tensors that are being sent until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Messages between the same two ranks that may be under way at the same time are told apart by their tag.
# A hop uses its tag and the next, an exchange two for each index.
KV_TAG, GRAD_TAG, EXCHANGE_TAG = 10, 20, 30


@dataclass(frozen=True)
class Peers:
    """The ranks one exchange runs over: a process group, this process's rank in it and its size. None is one rank."""

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
    """What is on its way, and the tensors that must stay alive and untouched until it has come."""

    def __init__(self, content: T, works: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        self._content = content
        self._works = list(works)
        self._keep = tuple(keep)

    def wait(self) -> T:
        """The content, complete; what was sent in exchange may be reused from now on."""
        for work in self._works:
            work.wait()
        self._works, self._keep = [], ()
        return self._content


def hop(pair: tuple[Tensor, Tensor], distance: int, peers: Peers, tag: int) -> PendingReceive[tuple[Tensor, Tensor]]:
    """Send two tensors to the rank ``distance`` ahead on the ring, and receive two from the rank as far behind."""
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
    """Send one or two tensors ``outgoing[r]`` to each other rank r and fill ``incoming[r]``, parts of ``content``.

    An all-to-all whose parts may lie anywhere, so that they need no buffer to be sent from or put into. Exchanges under
    way at the same time have different ``index``.
    """
    operations, sent = [], []
    others = [rank for rank in range(peers.size) if rank != peers.rank]
    for rank in others:
        for tag, part in enumerate(outgoing[rank], EXCHANGE_TAG + 2 * index):
            sent.append(part.contiguous())
            operations.append(dist.P2POp(dist.isend, sent[-1], group=peers.group, tag=tag, group_peer=rank))
        for tag, part in enumerate(incoming[rank], EXCHANGE_TAG + 2 * index):
            operations.append(dist.P2POp(dist.irecv, part, group=peers.group, tag=tag, group_peer=rank))
    return PendingReceive(content, dist.batch_isend_irecv(operations), keep=sent)


def all_gather[T](
    pieces: Sequence[Tensor], outs: Sequence[Tensor], content: T, peers: Peers, index: int
) -> PendingReceive[T]:
    """One or two tensors ``pieces[i]`` [rows, ...] of every rank, by rank, into ``outs[i]`` [size * rows, ...].

    ``content`` and ``index`` as for :func:`exchange`.
    """
    sent = [piece.contiguous() for piece in pieces]
    if sent[0].device.type != "cpu":
        works = [
            dist.all_gather_into_tensor(out, piece, group=peers.group, async_op=True)
            for out, piece in zip(outs, sent, strict=True)
        ]
        return PendingReceive(content, works, keep=sent)
    # gloo's all-gather would put everything together in a buffer of its own and copy it from there.
    slots = [out.unflatten(0, (peers.size, -1)) for out in outs]
    incoming = [[slot[rank] for slot in slots] for rank in range(peers.size)]
    arrival = exchange([sent] * peers.size, incoming, content, peers, index)
    for slot, piece in zip(incoming[peers.rank], sent, strict=True):
        slot.copy_(piece)
    return arrival
