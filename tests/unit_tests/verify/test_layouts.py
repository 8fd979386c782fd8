"""Layouts that once failed, or whose gradients are the hardest to combine."""

from typing import Any

import pytest

from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.verify.compare import compare_with_single_rank
from megatron_cp.verify.reduce import comparable
from megatron_cp.verify.report import diagnose
from tests.ranks import run_ranks
from tests.training_runs import tiny_config
from tests.unit_tests.models.hybrids import HYBRID, HYBRID_EXPERTS
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, PP2, SP, TP2, VPP2
from tests.unit_tests.training.layouts.test_model_variants import CLASSIC, EP2, ETP1, MLA, MOE

TIED = {"model__share_embeddings_and_output_weights": True}
DECENTRALIZED = {"dist__use_decentralized_pg": True}
PACKED = {"model__sequence_packing_scheduler": "dp_balanced"}
DYNAMIC = {
    "model__sequence_packing_scheduler": "default_dynamic_cp",
    "model__dynamic_context_parallel": True,
    "model__max_seqlen_per_dp_cp_rank": 8,  # a quarter of the longest
}
PLACED = {"model__packed_placement": "balanced"}
# Queries that are not compressed have a projection that upstream builds without its process group.
UNCOMPRESSED = MLA | {"model__q_lora_rank": None}
BIAS = {"model__moe_router_score_function": "sigmoid", "model__moe_router_enable_expert_bias": True}
MTP = {"model__mtp_num_layers": 2, "model__mtp_loss_scaling_factor": 0.5}


def compare(overrides: dict[str, Any]) -> tuple[bool, list[str], int]:
    (layout,) = comparable([tiny_config(**overrides)], 4, 2)
    result = compare_with_single_rank(layout, on_single_rank(layout))
    return result.equal, diagnose(result), result.gradients.number


def slow(overrides: dict[str, Any]) -> Any:
    """Mark features that the other cases cover in other combinations as slow."""
    return pytest.param(overrides, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "overrides",
    [
        # The last stage's copy of the tied weight: upstream asks the global state for its place in a checkpoint.
        TIED | PP2 | CP2 | DECENTRALIZED,
        CLASSIC | TP2 | SP | CP2,
        slow(MOE | CP2 | {"model__expert_model_parallel_size": 2, "ddp__overlap_grad_reduce": True}),
        # A router's bias is in checkpoints, and has no gradient.
        MOE | BIAS | CP2 | {"model__expert_model_parallel_size": 2},
        slow(PP2 | VPP2 | CP2 | DECENTRALIZED),
        {"model__softmax_type": "learnable"} | TP2 | CP2,
        slow(PACKED | CP4 | HCP),
        PACKED | PP2 | CP2,
        slow(DYNAMIC),
        slow(PACKED | CP4 | HCP | PLACED),
        DYNAMIC | PLACED,
        DYNAMIC | TP2 | SP | MTP | {"model__max_seqlen_per_dp_cp_rank": 16},
        slow(MTP | TP2 | CP2),
        slow(HYBRID | CP4 | HCP),
        UNCOMPRESSED | CP4 | HCP | DECENTRALIZED,
        slow(HYBRID | DYNAMIC),
        HYBRID_EXPERTS | CP2 | EP2 | PP2,
        slow(HYBRID_EXPERTS | DYNAMIC | TP2 | SP | EP2 | ETP1 | {"model__max_seqlen_per_dp_cp_rank": 16}),
        MTP | PP2 | VPP2 | CP2 | TIED,
        slow(MLA | DYNAMIC | TP2 | SP | CP2 | {"model__max_seqlen_per_dp_cp_rank": 16}),
    ],
    ids=str,
)
def test_equal_to_one_rank(overrides: dict[str, Any]) -> None:
    for equal, reported, _ in run_ranks(compare, 4, overrides):
        assert equal, reported
