"""Global state of megatron-core and torch.distributed without a public setter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from megatron.core import parallel_state

# megatron-core's global state before initialization, all None.
_UNSET = [name for name, value in vars(parallel_state).items() if name.isupper() and value is None]


def reset_parallel_state() -> list[dist.ProcessGroup] | None:
    """Reset the MPU's state; return the process groups it had, None without a state.

    The groups stay. megatron-core's ``destroy_model_parallel`` (0.19.2) leaves hierarchical, hybrid and other groups
    and rank lists behind, which the next initialization in the process would use.
    """
    groups = parallel_state._global_process_group_list if parallel_state.is_initialized() else None
    parallel_state.destroy_model_parallel()
    for name in _UNSET:
        setattr(parallel_state, name, None)
    parallel_state._HYBRID_DP_CP_GROUPS = {}
    return groups


def set_without_groups(pp_size: int, pp_rank: int) -> None:
    """Set state that megatron-core reads in addition to groups, unless the MPU did.

    Sequence-parallel linears read a scratch buffer; multi-token prediction reads the pipeline stage.
    """
    if not parallel_state.is_initialized():
        parallel_state.destroy_global_memory_buffer()
        parallel_state._set_global_memory_buffer()
        parallel_state.set_pipeline_model_parallel_world_size(pp_size)
        parallel_state.set_pipeline_model_parallel_rank(pp_rank)


@contextlib.contextmanager
def hidden_process_group() -> Iterator[None]:
    """Hide torch.distributed from megatron-core's dataset builder.

    With torch.distributed, only global rank 0 builds and all ranks read its files. That needs a file system shared by
    all nodes, and an error on rank 0 leaves the other ranks in a barrier. It is hidden from every thread, since the
    builder starts threads. ``parallel/collectives.py``, which sends reports meanwhile, imports the function itself.
    """
    original = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = original
