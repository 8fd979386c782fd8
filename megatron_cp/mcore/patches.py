"""Patches of megatron-core 0.19.2: upstream place, reason, and the test of each.

The list is also in ``3rdparty/README.md``. A patch is the last resort, after a config flag, a constructor argument, an
own module in a ``ModuleSpec``, or a subclass.
"""

from __future__ import annotations

import functools
import queue
from typing import Any

import torch

from megatron_cp.mcore import in_place, rotary


def apply() -> None:
    """Install all patches; called once, after the import of megatron.core (``hook``)."""
    _distributed_optimizer_loads_torch_adam()
    _checkpoint_results_stay_in_process()
    _checkpoints_run_no_code()
    _optimizer_state_of_several_buckets_is_saved_whole()
    _gradient_norms_are_exact()
    rotary.apply()
    in_place.apply()


def _distributed_optimizer_loads_torch_adam() -> None:
    """Load checkpoints into a distributed optimizer with torch's Adam.

    optimizer/distrib_optimizer.py:838, :1024, :1223, without Transformer Engine and apex. Upstream fails with a fresh
    optimizer. 838 asserts a ``step`` before any step, even for an optimizer without parameters (a pipeline stage
    without experts). 1223 reads a missing ``step`` and writes in place to leaves that require gradients. 1024 shares
    one ``step`` tensor among all parameters, so Adam counts one step per parameter. Tests:
    tests/unit_tests/training/checkpoint/test_checkpoint.py, test_resharding.py.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer_class = distrib_optimizer.DistributedOptimizer

    original_state_dict = optimizer_class.state_dict
    original_load = optimizer_class.load_state_dict
    original_set = optimizer_class._set_main_param_and_optimizer_states

    @functools.wraps(original_state_dict)
    def state_dict(self: Any) -> dict:
        if not any(group["params"] for group in self.optimizer.param_groups):
            groups = self.optimizer.state_dict()["param_groups"]
            plain = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            return {"optimizer": {"param_groups": [{**group, "step": 0.0} for group in plain]}}
        if len(self.optimizer.state) == 0:
            allocate_adam_state(self.optimizer)
        return original_state_dict(self)

    @functools.wraps(original_load)
    def load_state_dict(self: Any, state: dict) -> None:
        original_load(self, state)
        for param_state in self.optimizer.state.values():
            param_state["step"] = param_state["step"].clone()

    @functools.wraps(original_set)
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        with torch.no_grad():
            original_set(self, model_param, {"step": self.optimizer.state[main_param]["step"], **tensors})

    optimizer_class.state_dict = state_dict
    optimizer_class.load_state_dict = load_state_dict
    optimizer_class._set_main_param_and_optimizer_states = set_states


def _checkpoint_results_stay_in_process() -> None:
    """Use an in-process queue for results of synchronous saves.

    dist_checkpointing/strategies/filesystem_async.py:65. Upstream's queue lives in a *spawned manager process*: one
    more Python per rank, which imports the user's main script again. A script without an import guard then starts
    training again, and the save hangs. Test: tests/unit_tests/training/checkpoint/test_checkpoint.py.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _checkpoints_run_no_code() -> None:
    """Read checkpoints with a list of allowed classes.

    dist_checkpointing/strategies/torch.py:921 and serialization.py:225. torch unpickles the index and each object
    (``common_state``, ``rng``) without restriction, so a crafted checkpoint runs code. The same holds for ``common.pt``
    with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD. Test: tests/unit_tests/training/checkpoint/test_crafted_checkpoints.py.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    from megatron_cp.mcore.checkpoint_reader import CheckpointReader, load_common_file

    strategies.FileSystemReader = CheckpointReader
    serialization.load_common = load_common_file


def _optimizer_state_of_several_buckets_is_saved_whole() -> None:
    """Cut optimizer state of several gradient buckets at the right offsets.

    optimizer/distrib_optimizer.py:1764, with overlap_grad_reduce. Upstream gathers the state *without* the padding of
    each bucket, but cuts it at offsets that include padding. Every parameter after the first padded bucket is then
    saved with parts of another's state; only a warning about the last one shows it. Test:
    tests/unit_tests/training/checkpoint/test_checkpoint.py.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_param_state_fully_reshardable

    @functools.wraps(original)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = offsets_without_padding(buffer)
            return original(self, *args, **kwargs)
        finally:
            for buffer, offsets in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = offsets

    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded_param_state


def offsets_without_padding(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """Return ``buffer.param_index_map`` (start, end, bucket) without padding."""
    padding, so_far = [], 0
    for bucket in buffer.buckets:
        padding.append(so_far)
        so_far += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        param: (start - padding[bucket], end - padding[bucket], bucket)
        for param, (start, end, bucket) in buffer.param_index_map.items()
    }


def _gradient_norms_are_exact() -> None:
    """Compute gradient norms accurately on CPUs.

    optimizer/clip_grads.py:45 (utils.py:1325), without Transformer Engine and apex. ``torch.norm`` of a float32 CPU
    tensor adds squares one by one: for 50 million elements the norm is 0.4 % too small. Clipping is then too weak, and
    differs between one rank and shards. Here squares of 1024 elements are added in float32 and these sums in float64,
    in the same time. Test: tests/unit_tests/mcore/test_patches.py.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm:
        return

    def l2_norm(chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], *args: Any) -> Any:
        norms = [_norm_by_blocks(tensor) for tensors in tensor_lists for tensor in tensors]
        return torch.linalg.vector_norm(torch.stack(norms)).float().reshape(1), None

    clip_grads.l2_norm_impl = l2_norm


def _norm_by_blocks(tensor: torch.Tensor, size: int = 1024) -> torch.Tensor:
    """Return the 2-norm of all elements, in float64."""
    flat = tensor.detach().flatten()
    whole = flat.numel() // size * size
    dtype = torch.promote_types(flat.dtype, torch.float32)
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, size), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat((blocks, rest.reshape(1))), dtype=torch.float64)


def allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state that a fresh Adam allocates in its first step."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
