"""The logged number of parameters is the model's, under every layout."""

from typing import Any

import pytest

from megatron_cp.training.train import count_parameters
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config
from tests.unit_tests.models.hybrids import HYBRID_EXPERTS

TIED = {"model__share_embeddings_and_output_weights": True}
EXPERTS = {"model__num_moe_experts": 4}
SHARED = {"model__moe_shared_expert_intermediate_size": 32, "model__moe_shared_expert_gate": True}
TP2 = {"model__tensor_model_parallel_size": 2, "model__sequence_parallel": True}
PP2 = {"model__pipeline_model_parallel_size": 2}
EP2 = {"model__expert_model_parallel_size": 2}


def counted(overrides: dict[str, Any]) -> tuple[int, int]:
    """Return the announced number of parameters, and this rank's own."""
    run, _ = start(tiny_config(**overrides))
    result = count_parameters(run), sum(p.numel() for chunk in run.model for p in chunk.parameters())
    run.close()
    return result


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (TIED, TP2),
        (TIED, PP2),
        (EXPERTS, EP2),
        (EXPERTS | {"model__moe_layer_freq": [0, 0, 1, 1]}, PP2),
        (HYBRID_EXPERTS, PP2),
        (EXPERTS | SHARED | {"model__moe_latent_size": 24}, TP2 | EP2 | {"model__expert_tensor_parallel_size": 1}),
    ],
    ids=[
        "norms tp2",
        "tied pp2",
        "experts ep2",
        "experts in some layers pp2",
        "hybrid pp2",
        "shared experts tp2 ep2 etp1",
    ],
)
def test_every_parameter_counts_once(model: dict[str, Any], layout: dict[str, Any]) -> None:
    ((announced, held),) = run_ranks(counted, 1, model)
    assert announced == held
    assert {count for count, _ in run_ranks(counted, 2, model | layout)} == {held}
