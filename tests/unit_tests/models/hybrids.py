"""Overrides of ``tests.training_runs.tiny_config`` for hybrid models."""

import megatron_cp.models.hybrid  # noqa: F401 - no rank imports it for itself
from tests.unit_tests.training.layouts.test_model_variants import BIASED

# 16 Mamba heads in two groups: four ranks share a group by two, and three ranks cannot share evenly.
HYBRID = {
    "model__architecture": "hybrid",
    "model__hybrid_layer_pattern": "M*M-",
    "model__mamba_state_dim": 8,
    "model__mamba_head_dim": 8,
    "model__mamba_num_groups": 2,
}
# Two depths of multi-token prediction, each with an attention and a Mamba layer.
FURTHER = HYBRID | {"model__hybrid_layer_pattern": "M*M-/*M/*M", "model__mtp_num_layers": 2}
# Two layers of sigmoid-routed experts beside a shared one, whose biases move the choice, and a z-loss.
HYBRID_EXPERTS = (
    HYBRID
    | BIASED
    | {
        "model__hybrid_layer_pattern": "ME*E",
        "model__moe_shared_expert_intermediate_size": 32,
        "model__moe_shared_expert_gate": True,
    }
)
