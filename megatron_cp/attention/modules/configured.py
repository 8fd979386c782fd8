"""Transport, context and softmax offset of a configured attention layer.

Groups that do not match the configuration are refused here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.attention.context import CPContext
from megatron_cp.attention.transports.registry import RING, Transport, transport_named
from megatron_cp.config.names import NAME
from megatron_cp.parallel.device import device


def transport_of_layer(config: TransformerConfig, layer_number: int) -> str:
    """Return a layer's transport (1-based); past a list, the last entry.

    megatron-core passes it only if the model is split, but microbatches may be sliced even if the model is not.
    """
    kinds = config.cp_comm_type or RING.name
    return kinds if isinstance(kinds, str) else kinds[min(layer_number, len(kinds)) - 1]


def configured_context(
    config: TransformerConfig, comm_type: str, pg_collection: ProcessGroupCollection, where: str
) -> CPContext:
    """Build the context of ``config`` and its groups ``cp`` and ``hcp``.

    Raises ValueError with the name of a group that is missing or has another size than configured.
    """
    size = config.context_parallel_size
    if size == 1:
        return CPContext.alone(comm_type)
    transport = transport_named(comm_type)
    cp_group = getattr(pg_collection, "cp", None)
    if cp_group is None:
        raise ValueError(
            f"{where}: {NAME.model.context_parallel_size}={size} but pg_collection.cp, its process group, is missing"
        )
    _check_size(f"{where}: pg_collection.cp", cp_group, size, NAME.model.context_parallel_size)
    if not transport.hierarchical:
        return CPContext.build(comm_type, cp_group)
    context = CPContext.build(comm_type, _groups_of_levels(transport, config, pg_collection, where))
    if dist.get_rank(cp_group) != context.rank:
        raise ValueError(
            f"{where}: this process is rank {dist.get_rank(cp_group)} of pg_collection.cp, by which sequences are "
            f"sharded, but rank {context.rank} by pg_collection.hcp ({context}); "
            f"{transport.levels[0]} groups must be neighbours"
        )
    return context


def _groups_of_levels(
    transport: Transport, config: TransformerConfig, pg_collection: ProcessGroupCollection, where: str
) -> list[dist.ProcessGroup]:
    """Return ``pg_collection.hcp``, with sizes as configured."""
    needs = f"{NAME.model.cp_comm_type} {transport.name!r} needs"
    levels, size = transport.levels, config.context_parallel_size
    sizes, groups = config.hierarchical_context_parallel_sizes, getattr(pg_collection, "hcp", None)
    if not sizes or len(sizes) != 2 or sizes[0] * sizes[1] != size:
        raise ValueError(
            f"{where}: {needs} hierarchical_context_parallel_sizes=[{', '.join(levels)}] with product "
            f"{NAME.model.context_parallel_size}={size}, got {sizes}"
        )
    if groups is None:
        raise ValueError(
            f"{where}: {needs} pg_collection.hcp, the {' and '.join(levels)} process groups of sizes {list(sizes)}, "
            "but it is missing; without them every rank would attend to its own tokens only"
        )
    groups = list(groups)
    if len(groups) != 2 or None in groups:
        raise ValueError(
            f"{where}: pg_collection.hcp must hold the {' and the '.join(levels)} process group, got {groups}"
        )
    for name, group, expected in zip(levels, groups, sizes, strict=True):
        field = f"hierarchical_context_parallel_sizes={list(sizes)}"
        _check_size(f"{where}: pg_collection.hcp's {name} group", group, expected, field)
    return groups


def _check_size(what: str, group: dist.ProcessGroup, expected: int, field: str) -> None:
    actual = dist.get_world_size(group)
    if actual != expected:
        raise ValueError(f"{what} has {actual} ranks, but {field} requires {expected}")


def learnable_softmax_offset(config: TransformerConfig, pg_collection: ProcessGroupCollection) -> torch.nn.Parameter:
    """Create the parameter [heads on this rank], equal for all backends."""
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    # Drawn for all heads, so that it does not depend on tensor parallelism.
    drawn_on = torch.device("cpu") if config.use_cpu_initialization else device()
    offsets = torch.zeros(config.num_attention_heads, device=drawn_on, dtype=config.params_dtype)
    if config.perform_initialization:
        config.init_method(offsets)
    first = heads * dist.get_rank(pg_collection.tp) if config.tensor_model_parallel_size > 1 else 0
    offset = torch.nn.Parameter(offsets[first : first + heads].clone())
    # Without these attributes, gradient norms would count only the first tensor-parallel rank's heads.
    set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
    return offset
