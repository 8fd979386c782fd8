"""Real process groups, built both ways, compared with the layout.

They are compared with each other too.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.common.errors import RuntimeFault
from megatron_cp.config.run_config import RunConfig
from megatron_cp.parallel import process_groups
from megatron_cp.parallel.layout import FAMILIES, RankLayout, layout_of
from megatron_cp.parallel.process_groups import build_process_groups, destroy_process_groups
from tests.ranks import RanksFailed, run_ranks
from tests.training_runs import tiny_config

# Every field of a collection that holds one group.
FIELDS = (
    *FAMILIES,
    "dp_cp_gtp_remat",
    "intra_dp_cp",
    "intra_expt_dp",
    "expt_dp_gtp_remat",
    "tp_ep_pp_with_egtp_remat",
    "intra_dist_opt",
)


def build(config: RunConfig) -> Any:
    return build_process_groups(config.model, config.dist)


def config_of(tp: int = 1, cp: int = 1, pp: int = 1, hcp: list[int] | None = None, **more: Any) -> RunConfig:
    overrides = {
        "model__tensor_model_parallel_size": tp,
        "model__context_parallel_size": cp,
        "model__pipeline_model_parallel_size": pp,
        "model__hierarchical_context_parallel_sizes": hcp,
        "model__cp_comm_type": "a2a+p2p" if hcp else "p2p",
    }
    return tiny_config(**(overrides | more))


def members(config: RunConfig) -> dict[str, list[int] | None]:
    """Return global ranks of the caller's groups, after a reduction over each.

    The reduction shows that each group has just these ranks.
    """
    groups = build(config)
    result: dict[str, list[int] | None] = {}
    named = {name: getattr(groups, name) for name in FIELDS}
    named |= {f"hcp[{level}]": group for level, group in enumerate(groups.hcp or [])}
    for name, group in named.items():
        if group is None:
            result[name] = None
            continue
        ranks = dist.get_process_group_ranks(group)
        total = torch.tensor(2 ** dist.get_rank())
        dist.all_reduce(total, group=group)
        assert int(total) == sum(2**rank for rank in ranks), (name, ranks)
        result[name] = ranks
    destroy_process_groups(groups)
    return result


def both_kinds(cases: list[dict[str, Any]]) -> list[tuple[dict, dict]]:
    """Build MPU and decentralized groups in turn, in the same process."""
    return [(members(config_of(**case)), members(config_of(**case, dist__use_decentralized_pg=True))) for case in cases]


FOUR_RANKS = [
    {},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2},
    {"cp": 4},
    {"tp": 2, "cp": 2},
    {"cp": 2, "pp": 2},
    {"cp": 4, "hcp": [2, 2]},
    {"cp": 4, "hcp": [4, 1]},
    {"cp": 4, "hcp": [1, 4]},
    {"cp": 2, "hcp": [2, 1], "dist__use_tp_pp_dp_mapping": False},
    {"tp": 2, "pp": 2, "dist__use_tp_pp_dp_mapping": True},
    {"pp": 2, "dist__use_tp_pp_dp_mapping": True},
    {"model__expert_model_parallel_size": 2, "model__num_moe_experts": 2},
]
EIGHT_RANKS = [{"tp": 2, "cp": 4, "hcp": [2, 2]}, {"cp": 4, "pp": 2, "hcp": [2, 2]}]
MORE_OF_EIGHT = [{"cp": 8, "hcp": [4, 2]}, {"cp": 8, "hcp": [2, 4]}, {"tp": 2, "cp": 2, "pp": 2}]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (4, FOUR_RANKS),
        (8, EIGHT_RANKS),
        pytest.param(8, MORE_OF_EIGHT, marks=pytest.mark.slow),
        (6, [{"cp": 6, "hcp": [3, 2]}, {"cp": 3}]),
    ],
)
def test_decentralized_groups_are_the_mpus_groups(world_size: int, cases: list[dict[str, Any]]) -> None:
    by_rank = run_ranks(both_kinds, world_size, cases)
    for rank, results in enumerate(by_rank):
        for case, (mpu, decentralized) in zip(cases, results, strict=True):
            assert mpu == decentralized, (rank, case)
            config = config_of(**case)
            layout = layout_of(config.model, config.dist, world_size)
            for family in FAMILIES:
                expected = next((ranks for ranks in layout.groups(family) if rank in ranks), None)
                assert mpu[family] == expected, (rank, case, family)
            if layout.hierarchical:
                for level, lists in enumerate(layout.hierarchical_groups()):
                    assert mpu[f"hcp[{level}]"] == next(ranks for ranks in lists if rank in ranks), (rank, case)


def without_global_state() -> None:
    groups = build(config_of(cp=4, hcp=[2, 2], dist__use_decentralized_pg=True))
    assert not parallel_state.is_initialized()
    assert [group.size() for group in groups.hcp] == [2, 2]
    destroy_process_groups(groups)


def test_decentralized_groups_need_no_global_state() -> None:
    run_ranks(without_global_state, 4)


def reinitialize() -> None:
    groups = build(config_of(cp=4, hcp=[2, 2]))
    assert parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False) is not None
    destroy_process_groups(groups)
    assert parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False) is None
    groups = build(config_of(cp=2))
    assert groups.hcp is None
    assert parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False) is None
    destroy_process_groups(groups)


def test_nothing_stale_remains_after_another_initialization() -> None:
    """megatron-core's destroy_model_parallel leaves the hierarchical groups behind."""
    run_ranks(reinitialize, 4)


def fail_then_build() -> list[int]:
    """Initialize with sizes that megatron-core refuses, then build groups.

    It asserts the product of the hierarchical sizes after it has built half of the groups.
    """
    with pytest.raises(AssertionError):
        parallel_state.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 4])
    groups = build(config_of(cp=4, hcp=[2, 2]))
    sizes = [groups.cp.size(), *(group.size() for group in groups.hcp)]
    destroy_process_groups(groups)
    return sizes


def test_a_failed_initialization_leaves_nothing_behind() -> None:
    assert run_ranks(fail_then_build, 4) == [[4, 2, 2]] * 4


def timeouts(decentralized: bool) -> dict[str, float]:
    """Return the minutes that a collective of each group may take."""
    more = {"dist__use_decentralized_pg": decentralized, "dist__distributed_timeout_minutes": 7}
    groups = build(config_of(cp=4, hcp=[2, 2], **more))
    named = {name: getattr(groups, name) for name in FIELDS}
    named |= {f"hcp[{level}]": group for level, group in enumerate(groups.hcp)}
    cpu = torch.device("cpu")
    found = {
        name: group._get_backend(cpu).options._timeout.total_seconds() / 60
        for name, group in named.items()
        if group is not None
    }
    destroy_process_groups(groups)
    return found


@pytest.mark.parametrize("decentralized", [True, False])
def test_every_group_has_the_configured_timeout(decentralized: bool) -> None:
    for found in run_ranks(timeouts, 4, decentralized):
        assert {"cp", "dp_cp", "hcp[0]", "hcp[1]"} <= set(found)
        assert set(found.values()) == {7.0}, found


def missing_level() -> None:
    original = process_groups._decentralized

    def forgetful(*args: Any) -> Any:
        groups = original(*args)
        groups.hcp = None
        return groups

    process_groups._decentralized = forgetful
    build(config_of(cp=4, hcp=[2, 2], dist__use_decentralized_pg=True))


def test_a_missing_group_fails_at_the_start() -> None:
    with pytest.raises(RanksFailed, match=rf"{RuntimeFault.__name__}: rank 0: process group hcp\[0\] holds ranks None"):
        run_ranks(missing_level, 4)


def test_layout_equals_megatron_cores_rank_generator() -> None:
    from megatron.core.parallel_state import RankGenerator

    families = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "dp_cp": "dp-cp", "tp_cp": "tp-cp", "mp": "tp-pp"}
    for order, tp, cp, pp, dp in itertools.product(
        ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"), (1, 2, 3), (1, 2, 4), (1, 2), (1, 3)
    ):
        layout = RankLayout(tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, order=order)
        upstream = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        for family, token in families.items():
            assert layout.groups(family) == upstream.get_ranks(token)
