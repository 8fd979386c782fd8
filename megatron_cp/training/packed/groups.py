"""Process groups of packed microbatches, as configured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_cp.attention.transports.registry import known_transports
from megatron_cp.config.run_config import DistributedConfig, ModelConfig
from megatron_cp.dynamic_cp.buddy_tree import Positions, all_to_all_size, group_line
from megatron_cp.dynamic_cp.runtime.domain import DynamicGroups
from megatron_cp.launch import launcher
from megatron_cp.parallel.layout import RankLayout

logger = logging.getLogger(__name__)


def build_dynamic_groups(
    model: ModelConfig,
    distributed: DistributedConfig,
    groups: ProcessGroupCollection,
    layout: RankLayout,
    blocks: Sequence[Positions],
) -> DynamicGroups | None:
    """Build and log the groups of packed microbatches, if packed. Collective.

    ``blocks`` come from :func:`megatron_cp.dynamic_cp.buddy_tree.configured_blocks`.
    """
    if not blocks:
        return None
    domain = layout.dp * layout.cp
    transports = known_transports(model.transports)
    found = DynamicGroups(
        layout,
        blocks=blocks,
        at_start=distributed.dynamic_groups_at_start,
        timeout_minutes=distributed.distributed_timeout_minutes,
        a2a_size=partial(
            all_to_all_size,
            heads=model.attended_heads,
            ranks_per_node=head_exchange_ranks(model) if any(t.hierarchical for t in transports) else domain,
        )
        if any(t.exchanges_heads for t in transports)
        else None,
        with_tensor_parallel=bool(model.num_moe_experts),
        known={(0,): groups.dp_cp} if groups.intra_dist_opt.size() == 1 else None,
    )
    if groups.intra_dist_opt.rank() == 0:
        logger.info(group_line(found.legal, at_start=distributed.dynamic_groups_at_start))
    return found


def head_exchange_ranks(model: ModelConfig) -> int:
    """Return how many neighbouring ranks of a domain exchange heads.

    The configured all-to-all size, or the ranks of a node.
    """
    if model.hierarchical_context_parallel_sizes:
        return model.hierarchical_context_parallel_sizes[0]
    node = launcher.local_world_size() or torch.cuda.device_count() or 8
    return max(1, node // model.tensor_model_parallel_size)
