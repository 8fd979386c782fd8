"""The transport of each attention layer.

Microbatches are sliced, and the model is unsliced.
"""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.attention.modules.configured import transport_of_layer
from megatron_cp.attention.modules.native import ContextParallelAttention
from megatron_cp.training.setup import setup
from tests.ranks import run_ranks
from tests.training_runs import VOCAB, tiny_config
from tests.unit_tests.models.hybrids import HYBRID
from tests.unit_tests.training.layouts.cases import CP2, PP2

DYNAMIC = {"model__dynamic_context_parallel": True}
EVALUATION = {"dist__eval_context_parallel_size": 2}
MTP = {"model__mtp_num_layers": 2, "model__mtp_loss_scaling_factor": 0.5}
KINDS = ["a2a", "all_gather", "p2p", "a2a"]


def over(kinds: str | list[str]) -> dict[str, Any]:
    return {"model__cp_comm_type": kinds}


def built(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return the transports of this rank's attention layers in each of the runs."""
    found = []
    for overrides in runs:
        run = setup(tiny_config(**overrides), VOCAB)
        modules = [module for chunk in run.model for module in chunk.modules()]
        found.append([m.cp_comm_type for m in modules if isinstance(m, ContextParallelAttention)])
        run.close()
    return found


def test_every_layer_has_the_configured_transport() -> None:
    """megatron-core passes it on only if context_parallel_size is more than 1."""
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (DYNAMIC | over("a2a"), ["a2a"] * 4),
        (DYNAMIC | over("a2a+p2p"), ["a2a+p2p"] * 4),
        (EVALUATION | over("all_gather"), ["all_gather"] * 4),
        (EVALUATION | over("a2a+p2p"), ["a2a+p2p"] * 4),
        (DYNAMIC | over(KINDS), KINDS),
        (DYNAMIC | MTP | over(KINDS), [*KINDS, "a2a", "a2a"]),  # layers past the list have its last entry
        (DYNAMIC | HYBRID | over(KINDS), [KINDS[1]]),  # a hybrid's list counts all of its layers: M*M-
        (DYNAMIC, ["p2p"] * 4),
        (over("a2a"), ["p2p"] * 4),  # nothing is sliced
    ]
    for found in run_ranks(built, 2, [overrides for overrides, _ in cases]):
        assert found == [expected for _, expected in cases]


def test_stages_and_static_context_parallelism_count_layers_alike() -> None:
    runs = [DYNAMIC | PP2 | over(KINDS), CP2 | PP2 | over(KINDS), DYNAMIC | CP2 | HYBRID | over(KINDS)]
    for rank, found in enumerate(run_ranks(built, 4, runs)):
        stage = KINDS[2:] if rank >= 2 else KINDS[:2]
        assert found == [stage, stage, [KINDS[1]]]


@pytest.mark.parametrize("kinds", ["p2p", ["p2p", "a2a", "a2a"]])
def test_layers_past_a_per_layer_list_use_its_last_entry(kinds: str | list[str]) -> None:
    config = TransformerConfig(num_layers=3, hidden_size=8, num_attention_heads=1, cp_comm_type=kinds)
    listed = [kinds] * 3 if isinstance(kinds, str) else kinds
    assert [transport_of_layer(config, number) for number in range(1, 6)] == [*listed, listed[-1], listed[-1]]
