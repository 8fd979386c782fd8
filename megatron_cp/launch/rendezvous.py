"""Rendezvous of all ranks in a store, before torch.distributed starts.

Without a process group, the store reports faults that would block the group: a rank that fails early gives its reason,
a missing rank is named, and so are ranks configured with a different backend. (A node whose GPUs are not visible would
use gloo, and all ranks would wait until the timeout.)

torchrun (torch 2.11) keeps one store for all restarts, with addresses of processes that have ended. torchrun gives
ranks no value that is new in each start and equal on all nodes. So rank 0 writes a unique name for each start, which
prefixes the start's keys, and an answer once all ranks are there. A rank that arrives before rank 0 finds the name of
the previous start; it notices because its own key exists or because no answer comes, and checks again.
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
    format_ranks,
    join_limited,
    ranks_by_value,
)
from megatron_cp.launch import launcher
from megatron_cp.launch.sockets import environment_store
from megatron_cp.launch.store_watch import watch, within

_START, _ANSWER, _GONE, _WAITING = "start", "answer", "gone", "waiting"
# NCCL's watchdog writes this key, without any prefix, when a collective fails or times out (torch 2.11,
# ProcessGroupNCCL's global store). Every later start would read it and be ended.
_NCCL_FAILURE = "exception_dump"
_STORE_TIMEOUT = timedelta(seconds=5)
_SECONDS_TO_ANSWER = 10.0  # beyond a time limit, for a store that has many ranks to serve

_start_store: dist.Store | None = None


def rendezvous(backend: str, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Wait for all ranks; return this start's store, the rank and the size.

    ``backend`` describes this rank's backend and device in words.

    Raises:
        DataError, RuntimeFault: a rank of another node exited and gave its reason.
        RuntimeFault: ranks are missing or use different backends. torch would report a key's name, or nothing.
        StoreSilentError: the store's process does not answer. A thread checks this after the rendezvous.
    """
    global _start_store
    seconds = timeout.total_seconds()
    store, rank, world_size = within(seconds + _SECONDS_TO_ANSWER, lambda: _rendezvous(backend, timeout))
    watch(store, seconds)
    _start_store = store
    return store, rank, world_size


def _rendezvous(backend: str, timeout: timedelta) -> tuple[dist.Store, int, int]:
    launchers, rank, world_size = environment_store(timeout)
    ranks = [f"here_{other}" for other in range(world_size)]
    entry = f"{socket.gethostname()} {backend}"
    if rank == 0:
        store = _gather(launchers, ranks, entry, timeout)
    else:
        store = _join(launchers, ranks, rank, entry, timeout)
    problem = store.get(_ANSWER).decode()
    if problem:
        raise RuntimeFault(problem, on_all_ranks=True)
    return store, rank, world_size


def common_store() -> dist.Store:
    """Return this start's store, or that of another program's rendezvous."""
    return _start_store if _start_store is not None else _get_default_store()


def _gather(launchers: dist.Store, ranks: list[str], entry: str, timeout: timedelta) -> dist.Store:
    """Open a start as rank 0 and wait for the other ranks; return its store."""
    if launchers.check([_START]):
        for key_of_last_start in (_GONE, _NCCL_FAILURE):
            launchers.delete_key(key_of_last_start)
    name = uuid.uuid4().hex
    store = dist.PrefixStore(name, launchers)
    store.set(ranks[0], entry)
    launchers.set(_START, name)
    for _ in _looks(timeout):
        if store.check(ranks):
            store.set(_ANSWER, _difference([text.decode() for text in store.multi_get(ranks)]))
            return store
        _raise_published(launchers)
    raise _missing(store, ranks, timeout)


def _join(launchers: dist.Store, ranks: list[str], rank: int, entry: str, timeout: timedelta) -> dist.Store:
    """Wait for rank 0 to open a start, and for its answer; return the start's store."""
    launchers.set(_WAITING, "")  # read by the launcher if rank 0 never arrives
    name, store, is_new = "", launchers, True
    for _ in _looks(timeout):
        if launchers.check([_START]) and (current := launchers.get(_START).decode()) != name:
            name, store = current, dist.PrefixStore(current, launchers)
            is_new = store.add(f"times_{rank}", 1) == 1
            if is_new:
                store.set(ranks[rank], entry)
        if is_new:
            if name and store.check([_ANSWER]):
                return store
            _raise_published(launchers)
    raise _missing(store, ranks if name and is_new else ranks[:1], timeout)


def _looks(timeout: timedelta) -> Iterator[None]:
    """Yield until the timeout, less and less often: one store serves all ranks."""
    until, pause = time.monotonic() + timeout.total_seconds(), 0.01
    while time.monotonic() < until:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)


def _missing(store: dist.Store, ranks: Sequence[str], timeout: timedelta) -> RuntimeFault:
    """Build the fault that names the ranks whose keys are missing."""
    missing = [rank for rank, key in enumerate(ranks) if not store.check([key])] or [0]  # rank 0 writes the answer
    return RuntimeFault(
        f"{format_ranks(missing)} did not reach the rendezvous within {timeout.total_seconds() / 60:g} minutes. "
        "Fix: read the logs of these ranks and of their launchers, or raise dist.distributed_timeout_minutes",
        on_all_ranks=0 not in missing,
    )


def _difference(entries: Sequence[str]) -> str:
    """Describe how the ranks' backends differ; empty if they are equal."""
    hosts = [text.partition(" ")[0] for text in entries]
    found = ranks_by_value([text.partition(" ")[2] for text in entries])
    if len(found) == 1:
        return ""
    parts = []
    for backend, ranks in found.items():
        where = dict.fromkeys(hosts[rank] for rank in ranks)
        parts.append(f"{backend} on {format_ranks(ranks)} ({join_limited(list(where), ', ')})")
    return (
        f"ranks use different communication backends; training not started: {'; '.join(parts)}. Fix: the same "
        "dist.distributed_backend on every node, and a GPU that PyTorch can use on every node or on none: check with "
        "nvidia-smi, or leave the node out (Slurm: sbatch --exclude=NODE)"
    )


def publish_failure(reason: Exception) -> None:
    """Publish why this rank cannot join, for :func:`rendezvous` on other nodes."""
    if _start_store is not None or not launcher.can_notify_other_nodes():
        return
    code = EXIT_CONFIG if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    what = str(reason) if isinstance(reason, ConfigError | DataError | RuntimeFault) else repr(reason)

    def publish() -> None:
        launchers, rank, _ = environment_store(_STORE_TIMEOUT)
        _publish_exit(launchers, rank, code, what)

    with contextlib.suppress(RuntimeError, ValueError):  # the process that keeps the store may be gone or frozen, too
        within(_SECONDS_TO_ANSWER, publish)


def joined_start(address: str, port: int, killed: int, how: str) -> dist.Store | None:
    """Return the store of the start that all ranks have joined.

    Before the rendezvous is complete, publish ``how`` the rank ended and return None.

    Raises:
        RuntimeError: the process that keeps the store is gone.
    """
    launchers = dist.TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)
    if launchers.check([_START]):
        store = dist.PrefixStore(launchers.get(_START).decode(), launchers)
        if store.check([_ANSWER]):
            return store
    _publish_exit(launchers, killed, EXIT_FAILED, how)
    return None


def is_awaited(address: str, port: int, stopped: int) -> bool:
    """Return whether ranks wait at the rendezvous for a stopped rank; end them.

    Raises:
        RuntimeError: the process that keeps the store is gone.
    """
    launchers = dist.TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)
    at_rendezvous = launchers.check([_START]) or launchers.check([_WAITING])
    return at_rendezvous and joined_start(address, port, stopped, "stopped by a signal") is None


def _publish_exit(launchers: dist.Store, rank: int, code: int, what: str) -> None:
    """Publish why a rank ended; the first report wins."""
    text = f"{code} rank {rank}, on {socket.gethostname()}, exited before the rendezvous: {what}"
    launchers.compare_set(_GONE, "", text)


def _raise_published(launchers: dist.Store) -> None:
    """Raise the failure of :func:`publish_failure`, as an error of its kind."""
    if not launcher.can_notify_other_nodes() or not launchers.check([_GONE]):
        return
    code, _, reason = launchers.get(_GONE).decode().partition(" ")
    raise DataError(reason) if int(code) == EXIT_CONFIG else RuntimeFault(reason, on_all_ranks=True)
