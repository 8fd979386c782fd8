"""All exchanges of values between ranks, except attention transports and pipeline.

A rank that raises alone leaves the other ranks in their next collective. Work that may fail on one rank therefore runs
in :func:`raised_on_all_ranks`, :func:`run_on_all_ranks`, :func:`run_on_first_rank` or :func:`run_once_per_node`. All
functions are collective. Without torch.distributed a process is the only rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

# Not as dist.is_initialized, which mcore/global_state.py hides from megatron-core during dataset builds.
from torch.distributed import ProcessGroup, is_initialized
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.common.errors import DataError, RuntimeFault
from megatron_cp.common.limits import in_one_line
from megatron_cp.launch import launcher
from megatron_cp.parallel.transfer import send

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_HEARTBEAT = 20.0  # seconds; well below any timeout of a process group


def gather_objects[T](value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the ``value`` of each rank of ``group`` (None: all ranks), in order."""
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_on_first_rank[T](value: T) -> list[T]:
    """Return the ``value`` of each rank on rank 0, and [] on other ranks."""
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def broadcast_object[T](value: T, group: ProcessGroup | None = None) -> T:
    """Return the ``value`` of the first rank of ``group``."""
    if not is_initialized():
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, group_src=0, group=group)
    return values[0]


def gather_problems(problems: Sequence[str], group: ProcessGroup | None = None) -> list[str]:
    """Return ``rank 3: problem`` for each problem of each rank, equal on all ranks."""
    gathered = gather_objects(list(problems), group)
    return [f"rank {rank}: {problem}" for rank, listed in enumerate(gathered) for problem in listed]


def gather_tensors(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return each rank's ``tensor`` [...], of one shape on all ranks: [ranks, ...]."""
    ranks = dist.get_world_size(group)
    gathered = tensor.new_empty(ranks * tensor.numel())  # gloo concatenates instead of stacking
    dist.all_gather_into_tensor(gathered, tensor.flatten(), group=group)
    return gathered.view(ranks, *tensor.shape)


def sum_over_ranks(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Add up ``tensor`` over the ranks of ``group``, in place; return it."""
    dist.all_reduce(tensor, group=group)
    return tensor


def max_over_ranks(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Take the elementwise maximum over ``group``, in place; return ``tensor``."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def pack(message: DataclassInstance) -> Tensor:
    """Write a message of numbers, tensors and dicts of them into one tensor [width].

    float64, on the device of the tensors; a message of numbers alone is packed on the host.
    """
    fields = vars(message).values()
    values = [each for field in fields for each in (field.values() if isinstance(field, dict) else [field])]
    return torch.cat([torch.as_tensor(value, dtype=torch.float64).flatten() for value in values])


def unpack[T: DataclassInstance](packed: Tensor, like: T) -> T:
    """Read what :func:`pack` makes of a message with the keys and shapes of ``like``.

    Numbers get the types of ``like``, and dicts hold floats; both wait for the device of ``packed``.
    """
    values: dict[str, Any] = {}
    for name, value in vars(like).items():
        size = len(value) if isinstance(value, dict) else value.numel() if isinstance(value, Tensor) else 1
        part, packed = packed[:size], packed[size:]
        if isinstance(value, dict):
            values[name] = dict(zip(value, part.tolist(), strict=True))
        elif isinstance(value, Tensor):
            values[name] = part.view_as(value).to(value.dtype)
        else:
            values[name] = type(value)(part.item())
    return dataclasses.replace(like, **values)


def max_of_messages[T: DataclassInstance](message: T, group: ProcessGroup, device: torch.device) -> T:
    """Return the maximum of each number in ``message`` over all ranks.

    One exchange, and one wait for the device; a single rank does neither.
    """
    if group.size() == 1:
        return message
    return unpack(max_over_ranks(send(pack(message), device), group).cpu(), message)


@contextmanager
def raised_on_all_ranks(what: str) -> Iterator[None]:
    """Raise on every rank if the body raises on any rank.

    Raises:
        RuntimeFault: ``what``, which ranks failed, and why.
    """
    own = []
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
        own = [in_one_line(error)]
    failures = gather_problems(own)
    if failures:
        raise RuntimeFault(f"{what}. {'; '.join(failures[:4])}", on_all_ranks=True)


def run_on_first_rank[T](work: Callable[[], T], what: str) -> T:
    """Run ``work`` on rank 0; return the result on every rank.

    Raises:
        RuntimeFault: on every rank, see :func:`raised_on_all_ranks`.
    """
    with raised_on_all_ranks(what):
        value: Any = work() if dist.get_rank() == 0 else None
    return broadcast_object(value)


def run_on_all_ranks[T](work: Callable[[], T]) -> T:
    """Run data ``work`` on every rank; return this rank's result.

    Raises:
        DataError: on every rank, with the message of the first rank that failed.
    """
    value, problem = _attempt(work)
    for other in filter(None, gather_objects(problem)):
        raise DataError(other)
    return value  # type: ignore[return-value]


def run_once_per_node[T](work: Callable[[], T]) -> T:
    """Run data ``work`` on rank 0, then on the first rank of each other node.

    ``work`` may take long, and must skip what is already done: nodes on a shared file system find rank 0's result. Only
    nodes with a file system of their own repeat the work (or nodes that see new files late).

    Returns:
        The result, which must be equal on all nodes, on every rank.

    Raises:
        DataError: on every rank, if ``work`` fails on any node, or results differ.
    """
    rank = dist.get_rank() if is_initialized() else 0
    values = _outcomes(work, rank == 0)
    values += _outcomes(work, rank != 0 and launcher.local_rank() == 0)
    if any(value != values[0] for value in values):
        raise DataError(f"nodes have different data: only some find {values[0]}. Fix: copy the data to all nodes again")
    return values[0]


def _outcomes[T](work: Callable[[], T], own: bool) -> list[T]:
    """Return ``work()`` of each rank with ``mine``, on every rank.

    Other ranks receive a report every few seconds; one long collective would time out.

    Raises:
        DataError: on every rank, if ``work`` fails on one.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(_attempt, work) if own else None
        while True:
            reports = [report for report in gather_objects(_report(future)) if report is not None]
            if all(done for done, _, _ in reports):
                break
    for problem in filter(None, (problem for _, _, problem in reports)):
        raise DataError(problem)
    return [value for _, value, _ in reports]


def _attempt[T](work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result, or the problem with the data."""
    try:
        return work(), None
    except DataError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.filename or 'a data file'}: cannot be read: {error.strerror or error}."


def _report(future: Future[tuple[Any, str | None]] | None) -> tuple[bool, Any, str | None] | None:
    """Return this rank's progress after at most a heartbeat.

    (done, value, problem), or None without work.
    """
    if future is None:
        return None
    wait_for([future], timeout=_HEARTBEAT)
    return (True, *future.result()) if future.done() else (False, None, None)
