"""Rule A15 with other numbers of layers in the first or last pipeline stage.

The tests check what can be built.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_cp.config.recipes import load_recipe
from megatron_cp.rules import check
from megatron_cp.rules.explain import EXAMPLE_RECIPE
from tests.training_runs import tiny_config

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
FLAT = ("model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null", "model.context_parallel_size=1")


def upstream_builds(values: dict[str, Any]) -> bool:
    """Return whether megatron-core gives each layer to one stage, in order.

    No stage may be empty.
    """
    stages, chunks = values["pipeline_model_parallel_size"], values["virtual_pipeline_model_parallel_size"]
    try:
        config = TransformerConfig(hidden_size=8, num_attention_heads=1, pipeline_dtype="any", **values)
        layers: list[int] = []
        for chunk, stage in itertools.product([None] if chunks is None else range(chunks), range(stages)):
            count, offset = (f(config, chunk, stage) for f in (get_num_layers_to_build, get_transformer_layer_offset))
            if count < 1:
                return False
            layers += range(offset, offset + count)
    except (ValueError, AssertionError, ZeroDivisionError):
        return False
    return layers == list(range(values["num_layers"]))


@pytest.mark.parametrize("virtual", [None, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_accepted_stages_are_those_that_megatron_core_builds(stages: int, virtual: int | None) -> None:
    accepted = 0
    for layers, first, last in itertools.product((4, 5, 6, 8, 10), (None, 1, 2, 4), (None, 1, 2, 4)):
        values = {
            "num_layers": layers,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": virtual,
            FIRST: first,
            LAST: last,
        }
        if first or last:
            config = tiny_config(**{f"model__{name}": value for name, value in values.items()})
            found = [each for each in check(config, stages, environment="cpu") if each.rule == "A15"]
            assert len(found) <= 1
            assert (not found) == upstream_builds(values), (values, found)
            accepted += not found
    assert accepted


@pytest.mark.parametrize(
    ("overrides", "message", "fix"),
    [
        (f"{FIRST}=1 pipeline_model_parallel_size=1", "needs pipeline stages", f"model.{FIRST}=null"),
        (f"{FIRST}=1 {LAST}=1", "two stages of 1 and 1 layers do not add up to 4", f"model.{FIRST}=3"),
        (f"{LAST}=4", "num_layers=4 leaves 0 for the 1 other pipeline stages", "model.num_layers=5"),
        (f"{FIRST}=3 virtual_pipeline_model_parallel_size=2", "must be divisible by virtual", f"model.{FIRST}=2"),
        (f"{FIRST}=2 {LAST}=2 virtual_pipeline_model_parallel_size=2", "one stage only", f"model.{FIRST}=null"),
        (
            f"{FIRST}=1 account_for_loss_in_pipeline_split=true",
            "cannot be set at the same time with",
            "model.account_for_loss_in_pipeline_split=false",
        ),
    ],
)
def test_refused_stages_and_their_fixes(overrides: str, message: str, fix: str) -> None:
    def found(*more: str) -> list[str]:
        own = [f"model.{text}" for text in ("pipeline_model_parallel_size=2", *overrides.split())]
        violations = check(load_recipe(EXAMPLE_RECIPE, [*FLAT, *own, *more]), 4, environment="cpu")
        return [violation.message for violation in violations if violation.rule == "A15"]

    (reported,) = found()
    assert message in reported
    assert found(fix) == []


def test_a_hybrid_models_pattern_decides() -> None:
    hybrid = ("model.architecture=hybrid", "model.hybrid_layer_pattern=M*M*", "model.pipeline_model_parallel_size=2")
    config = load_recipe(EXAMPLE_RECIPE, [*FLAT, *hybrid, f"model.{FIRST}=1"])
    found = [each for each in check(config, 4, environment="cpu") if each.rule in ("A15", "K19")]
    assert [each.field for each in found] == [f"model.{FIRST}"] and found[0].severity == "error"
    assert found[0].fix == f"model.{FIRST}=null (| in the pattern begins a stage)"
