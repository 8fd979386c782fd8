"""How ranks meet before torch.distributed starts: in the store that their launcher keeps, or rank 0.

There is no process group yet, so this is where ranks hear what would keep one from ever working: a rank that cannot
come says why, one that does not come is named, and so are ranks that would speak by other means than the rest. (A node
whose GPUs are not seen would take gloo, and all would wait for each other until the time limit.)
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_cp import launcher
from megatron_cp.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, DataError, RuntimeFault, shown, shown_ranks

_have_met = False


def meet(means: str, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Wait for all ranks; returns the store in which they met, this rank and the number of ranks.

    ``means`` is what this rank will speak by: backend and device, in words.

    Raises:
        DataError, RuntimeFault: a rank of another node has said why it does not come.
        RuntimeFault: some have not come, or would speak by other means. torch would say so by the name of a key, or
            later, or not at all.
    """
    global _have_met
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(_attempt(), store)
    keys = [f"here_{other}" for other in range(world_size)]
    store.set(keys[rank], f"{socket.gethostname()} {means}")
    if store.add("here", 1) == world_size:
        store.set("all_here", "")
    try:
        store.wait(["all_here"], timeout)
        if launcher.can_tell_other_nodes() and store.check(["gone"]):
            raise _told(store.get("gone").decode())
        _compare([text.decode() for text in store.multi_get(keys)])
    except dist.DistStoreError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RuntimeFault(
            f"{shown_ranks(missing)} did not come within {timeout.total_seconds() / 60:g} minutes "
            "(dist.distributed_timeout_minutes). What they or their nodes' launchers have said is the reason.",
            on_all_ranks=0 not in missing,
        ) from error
    _have_met = True
    return store, rank, world_size


def tell_those_who_wait(reason: Exception) -> None:
    """Tell ranks of other nodes, which wait in :func:`meet` or soon will, that this one does not come. Nobody waits
    once all have met: from then on this does nothing."""
    if _have_met or not launcher.can_tell_other_nodes():
        return
    code = EXIT_CONFIG if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    what = str(reason) if isinstance(reason, ConfigError | DataError | RuntimeFault) else repr(reason)
    with contextlib.suppress(RuntimeError, ValueError):  # who keeps the store may be gone, too
        store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=5)))
        store = dist.PrefixStore(_attempt(), store)
        if store.check(["gone"]):
            return  # one has said so first
        store.set("gone", f"{code} rank {rank}, on {socket.gethostname()}, ended before all had met: {what}")
        store.set("all_here", "")


def _told(text: str) -> Exception:
    """What :func:`tell_those_who_wait` said, as an error of the same kind."""
    code, _, reason = text.partition(" ")
    return DataError(reason) if int(code) == EXIT_CONFIG else RuntimeFault(reason, on_all_ranks=True)


def _compare(said: Sequence[str]) -> None:
    """Raises RuntimeFault where not all ranks have the same means; ``said[rank]`` is its host's name and its means."""
    ranks, hosts = defaultdict(list), defaultdict(list)
    for rank, text in enumerate(said):
        host, _, means = text.partition(" ")
        ranks[means].append(rank)
        hosts[means].append(host)
    if len(ranks) > 1:
        parts = [f"{of} on {shown_ranks(ranks[of])} ({shown(list(dict.fromkeys(hosts[of])), ', ')})" for of in ranks]
        raise RuntimeFault(
            f"the ranks would not hear each other, nothing was trained: {'; '.join(parts)}. All need the same "
            "dist.distributed_backend and, if any have one, a GPU that PyTorch can use: where one is missing, "
            "nvidia-smi tells more, and the node can be left out (Slurm: sbatch --exclude=NODE)",
            on_all_ranks=True,
        )


def _attempt() -> str:
    """A name for this start of the ranks: torchrun (torch 2.11) keeps one store for all its restarts, in which ranks
    that start again would find the addresses of the dead. Only within a node: across nodes the counts may differ."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if one_node else 0}"
