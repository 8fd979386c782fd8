"""Global state of megatron-core and torch.distributed that no public function sets as we need it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from megatron.core import parallel_state

# megatron-core's global state before anything is built, all of it None.
_UNSET = [name for name, value in vars(parallel_state).items() if name.isupper() and value is None]


def forget_parallel_state() -> list[dist.ProcessGroup] | None:
    """Forget the MPU's state, all of it; returns the process groups it had, which stay, None where there was no state.

    megatron-core's own ``destroy_model_parallel`` leaves the hierarchical and hybrid groups, others and lists of ranks
    behind (0.19.2), and the next initialization in the same process would find them.
    """
    groups = parallel_state._global_process_group_list if parallel_state.is_initialized() else None
    parallel_state.destroy_model_parallel()
    for name in _UNSET:
        setattr(parallel_state, name, None)
    parallel_state._HYBRID_DP_CP_GROUPS = {}
    return groups


def set_without_groups(pp_size: int, pp_rank: int) -> None:
    """Set what megatron-core reads beside any groups, unless the MPU has set it.

    Sequence-parallel linears read a scratch buffer, and multi-token prediction the rank's pipeline stage.
    """
    if not parallel_state.is_initialized():
        parallel_state.destroy_global_memory_buffer()
        parallel_state._set_global_memory_buffer()
        parallel_state.set_pipeline_model_parallel_world_size(pp_size)
        parallel_state.set_pipeline_model_parallel_rank(pp_rank)


@contextlib.contextmanager
def hidden_process_group() -> Iterator[None]:
    """Hide torch.distributed from megatron-core's builder of data sets.

    With it, only global rank 0 builds and all others read its files, which needs a file system shared by all nodes; and
    an error on rank 0 leaves the others in a barrier. It is hidden from every thread, since the builder has some of its
    own. ``parallel/collectives.py``, which sends reports to the other ranks meanwhile, imports the function itself.
    """
    original = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = original
