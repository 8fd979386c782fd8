"""The configuration: derived values."""

import pytest

from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.rules import check


def test_finalize_fills_derived_values_and_is_idempotent():
    config = RunConfig(model=ModelConfig(hidden_size=96, num_attention_heads=6), recipe="mine").finalize()
    model = config.model
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (384, 16, 6)
    assert (model.seq_length, model.max_position_embeddings) == (256, 256)
    assert (config.checkpoint.save, config.checkpoint.load, config.dataset.kind) == ("runs/mine", "runs/mine", "mock")
    assert config.finalize() == config


def test_data_that_is_named_is_read():
    config = RunConfig()
    config.dataset.data_path = "corpus"
    assert config.finalize().dataset.kind == "indexed"


def test_the_default_scheduler_of_dynamic_context_parallelism():
    config = RunConfig(model=ModelConfig(dynamic_context_parallel=True)).finalize()
    assert config.model.sequence_packing_scheduler == "default_dynamic_cp"


@pytest.mark.parametrize(
    ("kinds", "transports"),
    [("a2a", ("a2a",)), (["p2p", "a2a", "p2p"], ("p2p", "a2a")), (["a2a", "a2a"], ("a2a",))],
)
def test_each_transport_is_named_once(kinds, transports):
    assert ModelConfig(cp_comm_type=kinds).transports == transports


def test_evaluation_in_groups_of_its_own_runs_packs():
    config = RunConfig()
    assert not config.runs_packs
    config.dist.eval_context_parallel_size = 2
    assert config.runs_packs
    assert RunConfig(model=ModelConfig(sequence_packing_scheduler="dp_balanced")).runs_packs


def test_data_parallel_size_is_the_rest_of_the_layout():
    config = RunConfig(model=ModelConfig(tensor_model_parallel_size=2, context_parallel_size=4))
    assert (config.model.fewest_ranks, config.model.data_parallel_size(24)) == (8, 3)


def test_evaluation_defaults_to_the_batches_of_training():
    config = RunConfig()
    config.train.global_batch_size, config.train.micro_batch_size = 12, 3
    assert config.evaluation_batch == (12, 3)
    config.validation.eval_micro_batch_size = 2
    assert config.evaluation_batch == (12, 2)
    config.validation.eval_global_batch_size, config.validation.eval_micro_batch_size = 8, None
    assert config.evaluation_batch == (8, 3)


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(num_layers=3),
        ModelConfig(num_layers=3, num_moe_experts=4),
        ModelConfig(num_layers=3, num_moe_experts=4, moe_layer_freq=2),
        ModelConfig(num_layers=1, num_moe_experts=4, moe_layer_freq=2),
        ModelConfig(num_layers=2, num_moe_experts=4, moe_layer_freq=[0, 1]),
        ModelConfig(num_layers=2, num_moe_experts=4, moe_layer_freq=[0, 0]),
        ModelConfig(architecture="hybrid", hybrid_layer_pattern="M*|ME"),
        ModelConfig(architecture="hybrid"),
    ],
    ids=lambda model: f"{model.hybrid_layer_pattern} {model.num_layers} {model.num_moe_experts} {model.moe_layer_freq}",
)
def test_the_parts_that_layers_have(model: ModelConfig) -> None:
    assert model.layer_letters == frozenset("".join(model.layer_types))


@pytest.mark.timeout(20)
def test_absurdly_many_layers_are_checked_like_others() -> None:
    many = ["model.num_layers=2000000000", "model.num_moe_experts=4", "model.recompute_granularity=selective"]
    config = load_recipe("llama_tiny_pretrain_config", [*many, "model.recompute_modules=[mlp]"])
    assert {violation.rule for violation in check(config, 4, environment="cpu")} == {"K7"}
