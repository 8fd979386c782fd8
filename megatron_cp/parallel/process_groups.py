"""Process groups: megatron-core's global state (MPU) or decentralized groups.

Both kinds come from the same :class:`~megatron_cp.parallel.layout.RankLayout`. The MPU builds its groups, which are
compared with the layout. Decentralized groups are built from the layout without global state, *including the
hierarchical context-parallel levels*, which upstream omits.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.config.run_config import DistributedConfig, ModelConfig
from megatron_cp.mcore.global_state import reset_parallel_state, set_without_groups
from megatron_cp.parallel.layout import FAMILIES, RankLayout, RankLists, group_lines, layout_of

logger = logging.getLogger(__name__)

# Fields that are the same group at the sizes built here.
_ALIASES = {
    "dp_cp_gtp_remat": "dp_cp",
    "intra_dp_cp": "dp_cp",
    "intra_expt_dp": "expt_dp",
    "expt_dp_gtp_remat": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
}
# Unused: several optimizer instances, weights sharded for recomputation, extra gather groups.
_ABSENT = ("inter_dist_opt", "gtp_remat", "expt_gtp_remat", "dp_cp_ag", "expt_dp_ag")


def build_process_groups(model: ModelConfig, distributed: DistributedConfig) -> ProcessGroupCollection:
    """Build every process group of a run; torch.distributed must be initialized.

    Collective: all ranks pass the same configuration. ``hcp`` of the result is ``[a2a_group, p2p_group]`` with
    hierarchical sizes, else ``None``.
    """
    layout = layout_of(model, distributed, dist.get_world_size())
    timeout = distributed.distributed_timeout_minutes
    if distributed.use_decentralized_pg:
        groups = _decentralized(layout, timeout)
    else:
        groups = _mpu(layout, timeout, model.virtual_pipeline_model_parallel_size)
    _check_against_layout(groups, layout)
    _log_groups(layout)
    return groups


def _mpu(layout: RankLayout, timeout_minutes: float, virtual_stages: int | None) -> ProcessGroupCollection:
    destroy_process_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual_stages,
        context_parallel_size=layout.cp,
        hierarchical_context_parallel_sizes=list(layout.hierarchical) if layout.hierarchical else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_minutes,
        order=layout.order,
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def _decentralized(layout: RankLayout, timeout_minutes: float) -> ProcessGroupCollection:
    timeout = timedelta(minutes=timeout_minutes)
    fields: dict[str, Any] = {family: new_groups(layout.groups(family), timeout, family) for family in FAMILIES}
    fields |= {alias: fields[family] for alias, family in _ALIASES.items()}
    fields["hcp"] = None
    if layout.hierarchical is not None:
        fields["hcp"] = [
            new_groups(lists, timeout, f"hcp{level}") for level, lists in enumerate(layout.hierarchical_groups())
        ]
    fields["intra_dist_opt"] = new_groups([list(range(layout.world_size))], timeout, "intra_dist_opt")
    fields |= dict.fromkeys(_ABSENT)
    set_without_groups(fields["pp"].size(), fields["pp"].rank())
    return ProcessGroupCollection(**fields)


def build_single_rank_groups(timeout_minutes: float) -> ProcessGroupCollection:
    """Build groups of size one for a run on the calling rank alone. Not collective.

    They are separate from the MPU's global state, which must not be in use meanwhile.
    """
    alone = new_group_alone(timedelta(minutes=timeout_minutes), "alone")
    fields = dict.fromkeys((*FAMILIES, *_ALIASES, "intra_dist_opt"), alone)
    set_without_groups(alone.size(), alone.rank())
    return ProcessGroupCollection(**fields, hcp=None, **dict.fromkeys(_ABSENT))


def new_groups(rank_lists: RankLists, timeout: timedelta, name: str) -> dist.ProcessGroup | None:
    """Create all groups of a family on all ranks; return the caller's own."""
    mine = None
    for ranks in rank_lists:
        group = dist.new_group(ranks, timeout=timeout, group_desc=name.upper())
        if dist.get_rank() in ranks:
            mine = group
    return mine


def new_group_alone(timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Create a group of the calling rank only. Not collective.

    A group of several ranks needs all ranks of the world: torch.distributed names it by the number of groups so far,
    which differs between ranks where some left groups out. Destroy it before older groups: its name has their number.
    """
    return dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True, group_desc=name.upper())


def destroy_process_groups(groups: ProcessGroupCollection | None = None) -> None:
    """Reset the MPU's state, and destroy ``groups`` and the groups built with them.

    megatron-core's ``destroy_model_parallel`` destroys no group. With gloo each group would keep three threads, one of
    which wakes a hundred times a second, until the process ends.
    """
    of_mpu = reset_parallel_state()
    if groups is None or not dist.is_initialized():
        return
    built = [group for value in vars(groups).values() for group in (value if isinstance(value, list) else [value])]
    found = built if of_mpu is None else of_mpu
    for group in {id(group): group for group in found if isinstance(group, dist.ProcessGroup)}.values():
        dist.destroy_process_group(group)


def _check_against_layout(groups: ProcessGroupCollection, layout: RankLayout) -> None:
    """Compare groups with the layout.

    A missing or wrong group would train a wrong model silently.
    """
    rank = dist.get_rank()
    expected: dict[str, RankLists] = {family: layout.groups(family) for family in FAMILIES}
    actual: dict[str, dist.ProcessGroup | None] = {family: getattr(groups, family) for family in FAMILIES}
    if layout.hierarchical is not None:
        for level, lists in enumerate(layout.hierarchical_groups()):
            expected[f"hcp[{level}]"] = lists
            actual[f"hcp[{level}]"] = groups.hcp[level] if groups.hcp else None
    for family, lists in expected.items():
        want = next((sorted(ranks) for ranks in lists if rank in ranks), None)
        group = actual[family]
        got = None if group is None else sorted(dist.get_process_group_ranks(group))
        if want != got:
            raise RuntimeFault(
                f"rank {rank}: process group {family} holds ranks {got}, but the layout "
                f"(tp={layout.tp}, cp={layout.cp}, pp={layout.pp}, dp={layout.dp}) needs ranks {want}"
            )


def _log_groups(layout: RankLayout) -> None:
    if dist.get_rank() == 0:
        for line in group_lines(layout):
            logger.info(line)
