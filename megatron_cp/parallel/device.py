"""The device, the torch.distributed backend, the seeds, and their start and stop."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.rendezvous import rendezvous

from megatron_cp import launcher
from megatron_cp.config import RunConfig
from megatron_cp.errors import DataError, RuntimeFault, shown
from megatron_cp.parallel import staged

logger = logging.getLogger(__name__)


def device() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def start_distributed(config: RunConfig) -> None:
    """Start torch.distributed from the launcher's environment, unless it already runs; one rank needs no launcher."""
    if torch.cuda.is_available():
        torch.cuda.set_device((launcher.local_rank() or 0) % torch.cuda.device_count())
    if dist.is_initialized():
        return
    backend = config.dist.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    timeout = timedelta(minutes=config.dist.distributed_timeout_minutes)
    if torch.cuda.is_available():
        check_gpus(backend, launcher.local_world_size() or 1, torch.cuda.device_count())
    if backend == staged.NAME:
        staged.register()
        if os.environ.get("RANK", "0") == "0":
            logger.warning(
                "dist.distributed_backend=staged carries GPU tensors through host memory and gloo: for correctness "
                "and debugging, not for speed"
            )
    try:
        if "RANK" in os.environ:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(_attempt(), store)
            _meet(store, rank, world_size, timeout)
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeFault, DataError):
        raise
    except (ValueError, RuntimeError) as error:
        raise RuntimeFault(
            f"torch.distributed could not start with dist.distributed_backend={backend!r}: {error}. "
            "Start the run with torchrun (or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)."
        ) from error


def _meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait for all ranks.

    Raises:
        DataError: one has said why it does not come.
        RuntimeFault: some have not come; torch would say so by the name of a key, or later, or not at all.
    """
    store.set(f"here_{rank}", "")
    if store.add("here", 1) == world_size:
        store.set("all_here", "")
    try:
        store.wait(["all_here"], timeout)
    except dist.DistStoreError as error:
        missing = [str(other) for other in range(world_size) if not store.check([f"here_{other}"])]
        raise RuntimeFault(
            f"{'rank' if len(missing) == 1 else 'ranks'} {shown(missing, ', ')} did not come within "
            f"{timeout.total_seconds() / 60:g} minutes (dist.distributed_timeout_minutes). What they or their nodes' "
            "launchers have said is the reason.",
            on_all_ranks="0" not in missing,
        ) from error
    if _others_can_be_told() and store.check(["gone"]):
        raise DataError(store.get("gone").decode())


def tell_those_who_wait(reason: Exception) -> None:
    """Tell ranks of other nodes, which wait in :func:`start_distributed` or soon will, that this one does not come."""
    if not _others_can_be_told():
        return
    with contextlib.suppress(RuntimeError, ValueError):  # who keeps the store may be gone, too
        store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=5)))
        store = dist.PrefixStore(_attempt(), store)
        store.set("gone", f"rank {rank}, on {socket.gethostname()}, ended before all had met: {reason}")
        store.set("all_here", "")


def _others_can_be_told() -> bool:
    """Whether there are other nodes and a launcher that keeps the store. (It ends those of its own node itself; and
    what was said in a first start would be heard in the next.)"""
    said = os.environ
    return (
        said.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and said.get("LOCAL_WORLD_SIZE") != said.get("WORLD_SIZE")
        and said.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    )


def _attempt() -> str:
    """A name for this start of the ranks: torchrun (torch 2.11) keeps one store for all its restarts, in which ranks
    that start again would find the addresses of the dead. Only within a node: across nodes the counts may differ."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if one_node else 0}"


def check_gpus(backend: str, ranks: int, gpus: int) -> None:
    """Raises RuntimeFault where NCCL would find ``ranks`` of this node sharing its fewer ``gpus``."""
    if backend == "nccl" and ranks > gpus:
        raise RuntimeFault(
            f"{ranks} ranks on a node with {gpus} GPU{'s' * (gpus != 1)}: NCCL refuses two ranks on one GPU. Start one "
            "rank a GPU, or set dist.distributed_backend=staged, which lets ranks share one, slowly",
            on_all_ranks=True,
        )


def stop_distributed(*, alone: bool = False) -> None:
    """Stop torch.distributed; without this about one gloo run in five aborts at exit.

    ``alone``: the others still run, and may wait for this rank. NCCL, which finishes what is under way before it stops,
    would wait for them: its groups are left to the end of the process.
    """
    if dist.is_initialized() and not (alone and dist.get_backend() == "nccl"):
        dist.destroy_process_group()


def random_state() -> dict[str, Any]:
    """The state of every random number generator that :func:`seed_everything` seeds."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def seed_everything(config: RunConfig, groups: ProcessGroupCollection, *, per_slice: bool = False) -> None:
    """Seed python, numpy, torch and megatron-core's tracker.

    Pipeline stages get different streams; with ``rng.data_parallel_random_init`` replicas do too. Weights are drawn
    from streams that data- and context-parallel ranks share. Dropout must not be: the ranks hold different tokens, and
    equal streams would drop the same hidden units on every slice of a sample, so ``per_slice`` tells them apart; not
    only the context-parallel ranks, as the slices of a pack may lie on any ranks of the two together.
    """
    seed = config.rng.seed + 100 * groups.pp.rank()
    if config.rng.data_parallel_random_init:
        seed += 10 * groups.dp.rank()
    if per_slice:
        seed += 100_003 * groups.dp_cp.rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank()
    )
