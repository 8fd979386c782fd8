"""Parameters and gradients of any layout as shards of whole tensors.

megatron-core's checkpoint code (``sharded_state_dict``) says where each shard lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

from megatron_cp.parallel.collectives import gather_objects, gather_tensors, sum_over_ranks
from megatron_cp.training.setup import Run


def parameter_shards(run: Run, of: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[ShardedTensor]:
    """Yield this rank's shard of every saved tensor, with (a view of) ``of(tensor)``.

    Includes expert biases; skips tensors for which ``of`` returns None.
    """
    metadata = {"dp_cp_group": run.groups.dp_cp, "non_homogeneous_layers": True}
    for chunk in run.model:
        for entry in nested_values(chunk.module.sharded_state_dict(metadata=metadata)):
            if not isinstance(entry, ShardedTensor | ShardedTensorFactory) or (values := of(entry.data)) is None:
                continue
            if isinstance(entry, ShardedTensorFactory):  # several tensors in one parameter, such as gate and up
                yield from nested_values(replace(entry, data=values).build())
            else:
                yield replace(entry, data=values, dtype=values.dtype)


def copy_shards(parts: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """Copy shards to float32 host memory."""
    return [
        replace(part, data=part.data.detach().to("cpu", torch.float32, copy=True), dtype=torch.float32)
        for part in parts
        if part.data is not None
    ]


def gather_gradients(run: Run) -> None:
    """Gather whole gradient buffers where the optimizer left shards."""
    if not run.config.optimizer.use_distributed_optimizer:
        return
    for chunk in run.model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            if group.size() == 1:
                continue
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()]
                bucket.grad_data.copy_(gather_tensors(own, group).flatten())


def whole_tensors(parts: Iterable[ShardedTensor], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that any rank holds a shard of, whole and on every rank.

    Collective; a rank without shards passes an empty list. Replicas of a shard count once.
    """
    own: dict[str, list[ShardedTensor]] = defaultdict(list)
    for part in parts:
        own[part.key].append(part)
    gathered = gather_objects({key: held[0].global_shape for key, held in own.items()})
    shapes = {key: shape for shapes in gathered for key, shape in shapes.items()}
    for key in sorted(shapes):
        whole = torch.zeros(shapes[key], dtype=torch.float32, device=device)
        for part in own.get(key, []):
            if is_main_replica(part.replica_id):
                whole[part.global_slice()] += part.data.to(device)
        yield key, sum_over_ranks(whole)


def load_parameters(run: Run, weights: Iterable[ShardedTensor]) -> None:
    """Load weights given as shards of any layout into the run. Collective."""
    places: dict[str, list[ShardedTensor]] = defaultdict(list)
    for part in parameter_shards(run, lambda parameter: parameter.detach()):
        places[part.key].append(part)
    for key, whole in whole_tensors(weights, run.device):
        for part in places.get(key, []):
            part.data.copy_(whole[part.global_slice()])
    run.optimizer.reload_model_params()
