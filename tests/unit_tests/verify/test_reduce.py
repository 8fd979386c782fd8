"""The reduced configurations: small, valid, and still the layout that was asked about."""

import time

import pytest

from megatron_cp.errors import ConfigError
from megatron_cp.one_rank import on_one_rank
from megatron_cp.recipes import list_recipes, load_recipe
from megatron_cp.rules import check
from megatron_cp.verify.reduce import PACKED_TOKENS, comparable

KEPT = (
    "num_attention_heads",
    "num_query_groups",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "num_moe_experts",
    "position_embedding_type",
    "softmax_type",
)


def errors(config, world_size):
    return [v for v in check(config, world_size, environment="cpu") if v.severity == "error"]


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_reduces_to_a_valid_small_layout(name):
    config = load_recipe(name)
    m = config.model
    world_size = config.recipe_world_size or config.fewest_ranks
    (small,) = comparable([config], world_size, 3)
    assert not errors(small, world_size)
    assert not errors(on_one_rank(small), 1)
    assert [getattr(small.model, field) for field in KEPT] == [getattr(m, field) for field in KEPT]
    stages = m.pipeline_model_parallel_size * (m.virtual_pipeline_model_parallel_size or 1)
    assert small.model.hidden_size == 64 and small.model.num_layers <= max(4, stages)
    least = 8 * max(4, m.context_parallel_size) * m.tensor_model_parallel_size
    assert small.dataset.seq_length <= (least if m.sequence_packing_scheduler is None else PACKED_TOKENS)


def test_what_a_layer_each_says_keeps_all_layers():
    kinds = ["p2p", "a2a", "all_gather", "p2p"]
    overrides = [f"model.cp_comm_type=[{','.join(kinds)}]", "model.hierarchical_context_parallel_sizes=null"]
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", overrides)], 4, 3)
    assert small.model.num_layers == 4 and small.model.cp_comm_type == kinds


def test_stages_and_microbatches_suffice():
    overrides = [
        "model.num_layers=32", "model.pipeline_model_parallel_size=4", "model.virtual_pipeline_model_parallel_size=2",
        "model.context_parallel_size=1", "model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null",
        "train.global_batch_size=64",
    ]  # fmt: skip
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", overrides)], 8, 3)
    assert small.model.num_layers == 8 and not errors(small, 8)
    assert small.train.global_batch_size == 2 * 2 * 8  # micro batch, replicas, twice the stages


def test_packed_samples_keep_their_number_of_ranks():
    overrides = [
        "model.sequence_packing_scheduler=default_dynamic_cp", "model.dynamic_context_parallel=true",
        "model.max_seqlen_per_dp_cp_rank=24", "dataset.seq_length=72",
    ]  # fmt: skip
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", overrides)], 4, 3)
    assert not errors(small, 4) and not errors(on_one_rank(small), 1)
    model, length = small.model, small.dataset.seq_length
    assert small.dataset.kind == "mock_documents" and model.dynamic_context_parallel
    assert 2 * model.max_seqlen_per_dp_cp_rank < length <= 3 * model.max_seqlen_per_dp_cp_rank
    assert on_one_rank(small).model.max_seqlen_per_dp_cp_rank == length


def test_the_reference_has_no_fused_or_chunked_loss():
    overrides = ["model.cross_entropy_loss_fusion=true", "mixed_precision=bf16_mixed"]
    reference = on_one_rank(load_recipe("llama_tiny_pretrain_config", overrides))
    assert not reference.model.cross_entropy_loss_fusion


def test_two_layouts_get_one_model():
    first = load_recipe("llama_tiny_pretrain_config", ["model.context_parallel_size=3", "model.cp_comm_type=p2p",
                                                       "model.hierarchical_context_parallel_sizes=null"])  # fmt: skip
    second = load_recipe("llama_tiny_pretrain_config", ["model.tensor_model_parallel_size=2",
                                                        "model.sequence_parallel=true"])  # fmt: skip
    small = comparable([first, second], 24, 3)
    assert small[0].dataset.seq_length == small[1].dataset.seq_length == 48
    assert small[0].train.global_batch_size == small[1].train.global_batch_size
    assert on_one_rank(small[0]).model == on_one_rank(small[1]).model
    assert not errors(small[0], 24) and not errors(small[1], 24)


def test_other_models_cannot_be_compared():
    first = load_recipe("llama_tiny_pretrain_config")
    second = load_recipe("llama_tiny_pretrain_config", ["model.num_layers=2", "model.rotary_base=500000.0"])
    with pytest.raises(ConfigError, match=r"model\.num_layers: differs(.|\n)*model\.rotary_base: differs"):
        comparable([first, second], 4, 3)


def test_packs_are_compared_with_packs():
    packs = ["model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=24", "dataset.seq_length=72"]
    first, second = (load_recipe("llama_tiny_pretrain_config", more) for more in ([], packs))
    with pytest.raises(ConfigError, match="they have no samples in common"):
        comparable([first, second], 4, 3)


def test_a_routers_loss_is_no_packs():
    experts = ["model.num_moe_experts=4", "model.moe_ffn_hidden_size=32", "model.moe_aux_loss_coeff=0.01"]
    packs = ["model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=24", "dataset.seq_length=72"]
    for more, coefficient in (([], 0.01), (packs, 0.0)):
        (small,) = comparable([load_recipe("llama_tiny_pretrain_config", experts + more)], 4, 3)
        assert small.model.moe_aux_loss_coeff == coefficient


def test_reducing_the_largest_recipe_is_quick():
    config = load_recipe("llama31_405b_pretrain_config")
    start = time.process_time()
    comparable([config], 1024, 3)
    assert time.process_time() - start < 0.2
