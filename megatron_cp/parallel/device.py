"""Device, torch.distributed backend and random seeds."""

from __future__ import annotations

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

from megatron_cp.common.errors import ConfigError, DataError, RuntimeFault, Violation, first_line
from megatron_cp.common.limits import describe_file_limit
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DistributedConfig, RNGConfig
from megatron_cp.launch import launcher, slurm
from megatron_cp.launch.rendezvous import rendezvous
from megatron_cp.launch.sockets import use_one_interface
from megatron_cp.launch.store_watch import stop_watching
from megatron_cp.parallel import staged

logger = logging.getLogger(__name__)

_FILES_PER_RANK = 16  # files of torch.distributed before groups exist
_CONNECTIONS_PER_RANK = 3  # store connections: torch, health monitor, store watch


def device() -> torch.device:
    """Return this rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def start_distributed(distributed: DistributedConfig) -> None:
    """Start torch.distributed from the launcher's environment, unless it runs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        _select_gpu((launcher.local_rank() or 0) % gpus)
    if dist.is_initialized():
        return
    use_one_interface()
    backend = distributed.distributed_backend or ("nccl" if gpus else "gloo")
    timeout = timedelta(minutes=distributed.distributed_timeout_minutes)
    # Slurm may show each task only the task's own GPU.
    if gpus and not (gpus == 1 and slurm.has_started_this()):
        check_gpus(backend, launcher.local_world_size() or 1, gpus)
    if backend == staged.NAME:
        staged.register()
        if os.environ.get("RANK", "0") == "0":
            logger.warning(
                f"{NAME.dist.distributed_backend}=staged: GPU tensors travel through host memory and gloo, slowly. Set "
                f"{NAME.dist.distributed_backend}=nccl to silence this warning"
            )
    check_open_files()
    try:
        if "RANK" in os.environ:
            store, rank, world_size = rendezvous(backend if gpus else f"{backend}, without a GPU,", timeout)
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeFault, DataError):
        raise
    except (ValueError, RuntimeError) as error:
        raise RuntimeFault(
            f"{NAME.dist.distributed_backend}={backend}: torch.distributed could not start: {error}. "
            "Fix: start the run with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        ) from error


def check_open_files() -> None:
    """Raise RuntimeFault if the rendezvous would exceed the limit of open files."""
    keeps_store = launcher.rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    needed = _FILES_PER_RANK + (_CONNECTIONS_PER_RANK * (launcher.world_size() or 1) if keeps_store else 0)
    if (limit := describe_file_limit(needed)) is not None:
        raise RuntimeFault(f"rank {launcher.rank()}, on {socket.gethostname()}: {limit}")


def _select_gpu(gpu: int) -> None:
    """Select this rank's GPU; report a broken or taken one without a traceback."""
    try:
        torch.cuda.set_device(gpu)
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        host = socket.gethostname()
        raise RuntimeFault(
            f"rank {launcher.rank()}, on {host}: GPU {gpu} of {torch.cuda.device_count()} cannot be used: "
            f"{first_line(error)}. Fix: check the GPU with nvidia-smi on {host}, or exclude the node (Slurm: sbatch "
            f"--exclude={host})"
        ) from error


def check_gpus(backend: str, ranks: int, gpus: int) -> None:
    """Raise ConfigError if NCCL ranks of this node would share a GPU."""
    if backend == "nccl" and ranks > gpus:
        message = f"{ranks} ranks on a node with {gpus} GPU{'s' * (gpus != 1)}: NCCL refuses two ranks on one GPU"
        fix = (
            "start one rank per GPU (nvidia-smi lists the GPUs of a node), or set "
            f"{NAME.dist.distributed_backend}=staged (slow: ranks share GPUs)"
        )
        raise ConfigError([Violation("", "error", NAME.dist.distributed_backend, message, fix, backend)])


def stop_distributed(*, alone: bool = False) -> None:
    """Stop torch.distributed; otherwise about one gloo run in five aborts at exit.

    ``alone``: other ranks still run and may wait for this rank. NCCL finishes pending work first and would wait for
    them, so its groups are left to the end of the process.
    """
    if dist.is_initialized() and not (alone and dist.get_backend() == "nccl"):
        dist.destroy_process_group()
    stop_watching()


def random_state() -> dict[str, Any]:
    """Return the state of every generator that :func:`seed_everything` seeds."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore a state of :func:`random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def seed_everything(rng: RNGConfig, groups: ProcessGroupCollection, *, per_slice: bool = False) -> None:
    """Seed python, numpy, torch and megatron-core's tracker.

    Pipeline stages get different streams; with ``rng.data_parallel_random_init`` replicas too. Data- and
    context-parallel ranks share the streams of weights. Dropout must differ: equal streams would drop the same hidden
    units on every slice of a sample. ``per_slice`` gives each rank of ``dp_cp`` its own stream, since slices of a pack
    may lie on any of these ranks.
    """
    seed = rng.seed + 100 * groups.pp.rank()
    if rng.data_parallel_random_init:
        seed += 10 * groups.dp.rank()
    if per_slice:
        seed += 100_003 * groups.dp_cp.rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank()
    )
