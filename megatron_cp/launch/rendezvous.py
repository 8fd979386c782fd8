"""How ranks meet before torch.distributed starts: in the store that their launcher keeps, or rank 0.

There is no process group yet, so this is where ranks hear what would keep one from ever working: a rank that cannot
come says why, one that does not come is named, and so are ranks that would speak by other means than the rest. (A node
whose GPUs are not seen would take gloo, and all would wait for each other until the time limit.)

Launchers may keep one store for all their restarts, as torchrun does (torch 2.11): ranks that start again would find
the addresses of the dead in it. Nothing that torchrun tells a rank is different in each start and the same on all nodes
(a node counts its own failures only). So rank 0 gives each start a name of its own, with which its keys begin, and
answers under that name when all are there. A rank that comes before rank 0 finds the last start's name, where it has
been already, or where nobody answers any more, and looks again.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_cp.common.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    ConfigError,
    DataError,
    RuntimeFault,
    ranks_by_value,
    shown,
    shown_ranks,
)
from megatron_cp.launch import launcher
from megatron_cp.launch.sockets import environment_store
from megatron_cp.launch.store_watch import watch, within

_START, _ANSWER, _GONE, _WAITING = "start", "answer", "gone", "waiting"
# Where a collective fails or is not done in time, NCCL's watchdog writes this, below all names that a store was given
# (torch 2.11, ProcessGroupNCCL's store for all): every later start would read it there, and be ended.
_OF_NCCL = "exception_dump"
_SECONDS_TO_TELL = timedelta(seconds=5)
_SECONDS_TO_ANSWER = 10.0  # beyond a time limit, for a store that has many ranks to serve

_met_in: dist.Store | None = None


def rendezvous(means: str, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Wait for all ranks; returns a store for this start alone, this rank and the number of ranks.

    ``means`` is what this rank will speak by: backend and device, in words.

    Raises:
        DataError, RuntimeFault: a rank of another node has said why it does not come.
        RuntimeFault: some have not come, or would speak by other means. torch would say so by the name of a key, or
            later, or not at all.
        StoreSilentError: the process that keeps the store does not answer. A thread checks this after the rendezvous.
    """
    global _met_in
    seconds = timeout.total_seconds()
    store, rank, world_size = within(seconds + _SECONDS_TO_ANSWER, lambda: _rendezvous(means, timeout))
    watch(store, seconds)
    _met_in = store
    return store, rank, world_size


def _rendezvous(means: str, timeout: timedelta) -> tuple[dist.Store, int, int]:
    launchers, rank, world_size = environment_store(timeout)
    ranks = [f"here_{other}" for other in range(world_size)]
    said = f"{socket.gethostname()} {means}"
    if rank == 0:
        store = _gather(launchers, ranks, said, timeout)
    else:
        store = _join(launchers, ranks, rank, said, timeout)
    problem = store.get(_ANSWER).decode()
    if problem:
        raise RuntimeFault(problem, on_all_ranks=True)
    return store, rank, world_size


def common_store() -> dist.Store:
    """The store in which this start's ranks met; where another program has started torch.distributed, its store."""
    return _met_in if _met_in is not None else _get_default_store()


def _gather(launchers: dist.Store, ranks: list[str], said: str, timeout: timedelta) -> dist.Store:
    """Begin a start, as rank 0, wait for the others, and answer; returns the start's store."""
    if launchers.check([_START]):
        for of_an_earlier_start in (_GONE, _OF_NCCL):
            launchers.delete_key(of_an_earlier_start)
    name = uuid.uuid4().hex
    store = dist.PrefixStore(name, launchers)
    store.set(ranks[0], said)
    launchers.set(_START, name)
    for _ in _looks(timeout):
        if store.check(ranks):
            store.set(_ANSWER, _difference([text.decode() for text in store.multi_get(ranks)]))
            return store
        _raise_what_was_told(launchers)
    raise _missing(store, ranks, timeout)


def _join(launchers: dist.Store, ranks: list[str], rank: int, said: str, timeout: timedelta) -> dist.Store:
    """Wait for rank 0 to begin a start, and for its answer; returns the start's store."""
    launchers.set(_WAITING, "")  # for the launcher, if rank 0 never comes
    name, store, is_new = "", launchers, True
    for _ in _looks(timeout):
        if launchers.check([_START]) and (current := launchers.get(_START).decode()) != name:
            name, store = current, dist.PrefixStore(current, launchers)
            is_new = store.add(f"times_{rank}", 1) == 1
            if is_new:
                store.set(ranks[rank], said)
        if is_new:
            if name and store.check([_ANSWER]):
                return store
            _raise_what_was_told(launchers)
    raise _missing(store, ranks if name and is_new else ranks[:1], timeout)


def _looks(timeout: timedelta) -> Iterator[None]:
    """Until the time is over; fewer and fewer, as one store serves all ranks."""
    until, pause = time.monotonic() + timeout.total_seconds(), 0.01
    while time.monotonic() < until:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)


def _missing(store: dist.Store, ranks: Sequence[str], timeout: timedelta) -> RuntimeFault:
    """Which of the ranks, by their keys, have not come."""
    missing = [rank for rank, key in enumerate(ranks) if not store.check([key])] or [0]  # which answers at once
    return RuntimeFault(
        f"{shown_ranks(missing)} did not come within {timeout.total_seconds() / 60:g} minutes "
        "(dist.distributed_timeout_minutes). What they or their nodes' launchers have said is the reason.",
        on_all_ranks=0 not in missing,
    )


def _difference(said: Sequence[str]) -> str:
    """What is wrong where not all ranks have the same means; ``said[rank]`` is its host's name and its means."""
    hosts = [text.partition(" ")[0] for text in said]
    found = ranks_by_value([text.partition(" ")[2] for text in said])
    if len(found) == 1:
        return ""
    parts = []
    for means, ranks in found.items():
        where = dict.fromkeys(hosts[rank] for rank in ranks)
        parts.append(f"{means} on {shown_ranks(ranks)} ({shown(list(where), ', ')})")
    return (
        f"the ranks would not hear each other, nothing was trained: {'; '.join(parts)}. All need the same "
        "dist.distributed_backend and, if any have one, a GPU that PyTorch can use: where one is missing, nvidia-smi "
        "tells more, and the node can be left out (Slurm: sbatch --exclude=NODE)"
    )


def publish_failure(reason: Exception) -> None:
    """Publish why this rank cannot join, for ranks of other nodes in :func:`rendezvous`; does nothing after it."""
    if _met_in is not None or not launcher.can_tell_other_nodes():
        return
    code = EXIT_CONFIG if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    what = str(reason) if isinstance(reason, ConfigError | DataError | RuntimeFault) else repr(reason)

    def tell() -> None:
        launchers, rank, _ = environment_store(_SECONDS_TO_TELL)
        _leave_word(launchers, rank, code, what)

    with contextlib.suppress(RuntimeError, ValueError):  # who keeps the store may be gone or frozen, too
        within(_SECONDS_TO_ANSWER, tell)


def begun(address: str, port: int, killed: int, how: str) -> dist.Store | None:
    """For a launcher, which says for a rank that was ``killed`` what it no longer can: the store of the start that all
    ranks have begun. Where they have not met yet, those that wait are told, and there is none.

    Raises:
        RuntimeError: who keeps the store is gone.
    """
    launchers = dist.TCPStore(address, port, is_master=False, timeout=_SECONDS_TO_TELL)
    if launchers.check([_START]):
        store = dist.PrefixStore(launchers.get(_START).decode(), launchers)
        if store.check([_ANSWER]):
            return store
    _leave_word(launchers, killed, EXIT_FAILED, how)
    return None


def is_waited_for(address: str, port: int, stopped: int) -> bool:
    """Check, for a launcher, whether ranks wait at the rendezvous for one that ``stopped``; other nodes' ranks end.

    Raises:
        RuntimeError: the process that keeps the store is gone.
    """
    launchers = dist.TCPStore(address, port, is_master=False, timeout=_SECONDS_TO_TELL)
    at_rendezvous = launchers.check([_START]) or launchers.check([_WAITING])
    return at_rendezvous and begun(address, port, stopped, "it was asked to stop") is None


def _leave_word(launchers: dist.Store, rank: int, code: int, what: str) -> None:
    """Who says so first is the reason."""
    text = f"{code} rank {rank}, on {socket.gethostname()}, ended before all had met: {what}"
    launchers.compare_set(_GONE, "", text)


def _raise_what_was_told(launchers: dist.Store) -> None:
    """Raises what :func:`publish_failure` said, as an error of the same kind."""
    if not launcher.can_tell_other_nodes() or not launchers.check([_GONE]):
        return
    code, _, reason = launchers.get(_GONE).decode().partition(" ")
    raise DataError(reason) if int(code) == EXIT_CONFIG else RuntimeFault(reason, on_all_ranks=True)
