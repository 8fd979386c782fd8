"""Check messages against NCCL's rules.

Messages are delivered in the order sent, without tags, and not before ``wait``.

gloo, which carries them here, is more lenient in three ways, and each would hide a fault:

- gloo matches messages between two ranks by their tags. NCCL delivers the first that was sent.
- gloo's sends and collectives are independent of each other. NCCL's wait for earlier ones of their group.
- gloo has often delivered before ``wait`` is called. :func:`too_early` finds accesses before that: no kernel may read
  or write a receive buffer or write a send buffer, and the memory of neither may be released.

:func:`carry` replays what all ranks sent, and waited for, in NCCL's order.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

RECEIVED, SENT = "received into", "sent"
_CALLS = (
    "send", "recv", "isend", "irecv", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier",
)  # fmt: skip


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


class Region(NamedTuple):
    """Bytes of a storage."""

    storage: int
    first: int
    last: int

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        size = tensor.element_size()
        reach = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.storage_offset() * size
        return cls(tensor.untyped_storage()._cdata, first, first + (reach + 1) * size if tensor.numel() else first)

    def meets(self, other: Region) -> bool:
        return self.storage == other.storage and self.first < other.last and other.first < self.last


@dataclass(frozen=True)
class Message:
    """One end of a message, or a rank's part in a collective.

    group: ranks of the group. peer: the other end's rank in the group; None for a collective. batch: of sends and
    receives that begin together; None for a single one.
    """

    number: int
    group: tuple[int, ...]
    name: str
    what: tuple
    peer: int | None = None
    batch: int | None = None


@dataclass
class _Ledger:
    """Messages that this process sent."""

    events: list[Message | int] = field(default_factory=list)  # an int: wait for the message of that number
    # Buffers of messages, kept alive as NCCL does: the tensor, its memory, and whether it is read or written.
    under_way: dict[int, list[tuple[Tensor, Region, str]]] = field(default_factory=dict)
    opened: list[int] | None = None  # messages of the present call
    number: int = 0
    batch: int | None = None
    batches: int = 0
    by_torch: int = 0  # present calls of torch.distributed: gloo's own copies during them do not count

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


ledger = _Ledger()


def write_down(name: str, func: Any, args: tuple, group: Any) -> None:
    """Record a message that is about to be sent or received."""
    ledger.number += 1
    p2p = name in ("send", "recv_")
    used, shapes = [], []
    for tensor, is_output in _tensors(func, args):
        received = name == "recv_" if p2p else is_output
        used.append((tensor, Region.of(tensor), RECEIVED if received else SENT))
        shapes.append((tuple(tensor.shape), str(tensor.dtype)))
    ranks = tuple(dist.get_process_group_ranks(group))
    if p2p:
        message = Message(ledger.number, ranks, name.strip("_"), (*shapes, args[3]), args[2], ledger.batch)
    else:
        # Ranks may give a collective parts of different sizes: their number and kind must agree.
        message = Message(ledger.number, ranks, name, tuple(sorted({dtype for _, dtype in shapes})))
    ledger.events.append(message)
    ledger.under_way[ledger.number] = used
    if ledger.opened is None:  # sent by an unknown function of torch.distributed
        arrived(ledger.number)
    else:
        ledger.opened.append(ledger.number)


def _tensors(func: Any, args: tuple) -> Iterator[tuple[Tensor, bool]]:
    """Return a collective's tensors, and whether they are received into.

    torch's schemas mark no writes.
    """
    for argument, value in zip(func._schema.arguments, args, strict=False):
        in_place = argument.name == "tensors"
        for tensor in tensors_in(value):
            yield tensor, in_place or "output" in argument.name


def arrived(number: int) -> None:
    used = ledger.under_way.pop(number, None)
    if used is None:
        return
    ledger.events.append(number)
    for tensor, memory, kind in used:
        assert Region.of(tensor) == memory, f"memory of a tensor that was being {kind} was given away"


def too_early(tensors: Sequence[tuple[Tensor, bool]]) -> str | None:
    """Return what is wrong with a kernel that gets these tensors now.

    ``writes``: whether the kernel writes to them.
    """
    if ledger.by_torch or not ledger.under_way:
        return None
    for tensor, written in tensors:
        here = Region.of(tensor)
        for used in ledger.under_way.values():
            for _, memory, kind in used:
                if (kind == RECEIVED or written) and memory.meets(here):
                    return f"{'writes' if written else 'reads'} {tuple(tensor.shape)}, which is being {kind}"
    return None


@contextmanager
def _by_torch() -> Iterator[None]:
    ledger.by_torch += 1
    try:
        yield
    finally:
        ledger.by_torch -= 1


class Work:
    """Torch's Work, with the messages that it stands for."""

    def __init__(self, work: Any, numbers: list[int]) -> None:
        self._work, self._numbers = work, numbers

    def wait(self, *args: Any) -> Any:
        with _by_torch():
            done = self._work.wait(*args)
        for number in self._numbers:
            arrived(number)
        return done

    def is_completed(self) -> bool:
        with _by_torch():
            done = self._work.is_completed()
        if done:
            for number in self._numbers:
                arrived(number)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def observe() -> None:
    """Wrap torch.distributed's functions to record which messages a ``wait`` is for."""
    for name in _CALLS:
        _replace(name, _observed(getattr(dist, name)))
    send_batch = dist.batch_isend_irecv

    @functools.wraps(send_batch)
    def batch(operations: Any) -> Any:
        ledger.batches += 1
        ledger.batch = ledger.batches
        try:
            return send_batch(operations)
        finally:
            ledger.batch = None

    _replace("batch_isend_irecv", batch)
    _replace("_coalescing_manager", _coalescing(distributed_c10d._coalescing_manager))


def _replace(name: str, function: Callable) -> None:
    setattr(dist, name, function)
    setattr(distributed_c10d, name, function)


@contextmanager
def _sending() -> Iterator[list[int]]:
    """Enter a function of torch.distributed; yield the messages that it sends."""
    outer, ledger.opened = ledger.opened, []
    try:
        with _by_torch():
            yield ledger.opened
    finally:
        ledger.opened = outer


def _observed(function: Callable) -> Callable:
    @functools.wraps(function)
    def send(*args: Any, **kwargs: Any) -> Any:
        with _sending() as opened:
            work = function(*args, **kwargs)
        if isinstance(work, distributed_c10d._IllegalWork):  # a coalescing manager sends, and has a wait
            return work
        if work is not None and hasattr(work, "wait"):
            return Work(work, opened)
        for number in opened:
            arrived(number)
        return work

    return send


def _coalescing(coalesce: Callable) -> Callable:
    """Record a coalescing manager.

    It sends at its end, synchronously or with a wait later.
    """

    @functools.wraps(coalesce)
    @contextmanager
    def manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with ExitStack() as end, coalesce(*args, **kwargs) as handle:
            yield handle
            opened = end.enter_context(_sending())
        handle.works = [Work(work, opened) for work in handle.works]
        if not handle.works:
            for number in opened:
                arrived(number)

    return manager


def carry(ranks: Sequence[list[Message | int]], one_stream: bool = False) -> int:
    """Replay what the ranks sent as NCCL does, and return the number of messages.

    Messages of a group run one after the other: a rank's next collective or batch begins when the last one has
    finished. Single messages have a stream for each pair of ranks. With ``one_stream`` (as for groups created with a
    device) they use the group's stream. A collective finishes when it is next on all ranks of its group. A send or
    receive finishes when its other end has started. A waiting rank sends nothing more.

    Raises:
        AssertionError: ranks deadlock, or the two ends of a message belong to different messages.
    """
    rest = [deque(events) for events in ranks]
    streams: dict[tuple, deque[list[Message]]] = defaultdict(deque)
    done: list[set[int]] = [set() for _ in ranks]

    def key(rank: int, message: Message) -> tuple:
        if message.peer is None or message.batch is not None or one_stream:
            return rank, message.group
        return rank, message.group, message.peer

    def proceed(rank: int) -> bool:
        moved = False
        while rest[rank]:
            event = rest[rank][0]
            if isinstance(event, int):
                if event not in done[rank]:
                    break
            else:
                stream = streams[key(rank, event)]
                together = stream and event.batch is not None and stream[-1] and stream[-1][0].batch == event.batch
                stream[-1].append(event) if together else stream.append([event])
            rest[rank].popleft()
            moved = True
        return moved

    def finish(rank: int, message: Message) -> None:
        stream = streams[key(rank, message)]
        stream[0].remove(message)
        if not stream[0]:
            stream.popleft()
        done[rank].add(message.number)

    def other_end(rank: int, message: Message) -> Message | None:
        assert message.peer is not None
        peer, me = message.group[message.peer], message.group.index(rank)
        mirrored = Message(0, message.group, "", (), me, message.batch)
        stream = streams[key(peer, mirrored)]
        kind = "recv" if message.name == "send" else "send"
        heads = stream[0] if stream else []
        return next((head for head in heads if (head.name, head.peer) == (kind, me)), None)

    carried, moved = 0, True
    while moved:
        moved = bool(sum([proceed(rank) for rank in range(len(ranks))]))
        for (rank, *_), stream in list(streams.items()):
            if not stream:
                continue
            for message in list(stream[0]):
                if message.peer is not None:
                    if message.name != "send" or (other := other_end(rank, message)) is None:
                        continue
                    assert message.what == other.what, f"{rank} sends {message}, which is taken for {other}"
                    finish(rank, message)
                    finish(message.group[message.peer], other)
                    carried, moved = carried + 1, True
                    break
                heads = [streams[r, message.group] for r in message.group]
                if rank == message.group[0] and all(head and head[0][0].peer is None for head in heads):
                    parts = [head[0][0] for head in heads]
                    assert len({(part.name, part.what) for part in parts}) == 1, f"not one collective: {parts}"
                    for r, part in zip(message.group, parts, strict=True):
                        finish(r, part)
                    carried, moved = carried + 1, True
    waiting = {rank: (events[0], len(events)) for rank, events in enumerate(rest) if events}
    stuck = {name: stream[0] for name, stream in streams.items() if stream}
    assert not waiting and not stuck, f"for ever: {waiting}, {stuck}"
    return carried
