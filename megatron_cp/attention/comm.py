"""The exchanges of context parallelism: a ring hop, an all-to-all and a gather.

Every exchange starts at once and returns an :class:`Arrival`. Its ``wait`` may be called once only where gloo is
concerned (a second wait on a gloo receive blocks for ever), so an Arrival remembers that it has waited; and it keeps
what is being sent alive until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Messages between the same two ranks that may be under way at the same time are told apart by their tag.
# A hop uses its tag and the next.
KV_TAG, GRAD_TAG = 10, 20


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


class Arrival[T]:
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


def hop(pair: tuple[Tensor, Tensor], distance: int, peers: Peers, tag: int) -> Arrival[tuple[Tensor, Tensor]]:
    """Send two tensors to the rank ``distance`` ahead on the ring, and receive two from the rank as far behind."""
    to, source = (peers.rank + distance) % peers.size, (peers.rank - distance) % peers.size
    sent = pair[0].contiguous(), pair[1].contiguous()
    arriving = torch.empty_like(sent[0]), torch.empty_like(sent[1])
    operations = []
    for index, (outgoing, incoming) in enumerate(zip(sent, arriving, strict=True)):
        operations.append(dist.P2POp(dist.isend, outgoing, group=peers.group, tag=tag + index, group_peer=to))
        operations.append(dist.P2POp(dist.irecv, incoming, group=peers.group, tag=tag + index, group_peer=source))
    return Arrival(arriving, dist.batch_isend_irecv(operations), keep=sent)


def all_to_all(
    sent: Tensor, send_sizes: list[int], receive_sizes: list[int], peers: Peers, shape: tuple[int, ...] = (-1,)
) -> Arrival[Tensor]:
    """Send consecutive parts of the flat tensor ``sent`` to the ranks in order; theirs come as one ``shape``."""
    received = sent.new_empty(sum(receive_sizes))
    work = dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=peers.group, async_op=True)
    return Arrival(received.view(shape), [work], keep=(sent,))


def all_gather(tensor: Tensor, peers: Peers, out: Tensor) -> Arrival[Tensor]:
    """[rows, ...] of every rank, one after the other, into ``out`` [size * rows, ...]."""
    tensor = tensor.contiguous()
    work = dist.all_gather_into_tensor(out, tensor, group=peers.group, async_op=True)
    return Arrival(out, [work], keep=(tensor,))


def reduce_scatter(tensor: Tensor, peers: Peers) -> Tensor:
    """The sum over ranks of part ``rank`` of [size, ...].

    As an all-to-all and a local sum in rank order: the bytes of a reduce-scatter, which gloo would turn into an
    all-reduce, and the same result on every run.
    """
    if peers.size == 1:
        return tensor[0]
    part = tensor[0].numel()
    received = all_to_all(tensor.contiguous().view(-1), [part] * peers.size, [part] * peers.size, peers).wait()
    return received.view_as(tensor).sum(0)


def permute_rows(x: Tensor, order: np.ndarray, inverse: bool = False) -> Tensor:
    """Rows of ``x`` such that row i of the result is row ``order[i]`` (or the other way round with ``inverse``)."""
    index = torch.from_numpy(np.argsort(order) if inverse else order.copy()).to(x.device)
    return x.index_select(0, index)
