"""The recipes against published numbers of models and training recipes."""

import functools
import math
from dataclasses import asdict, replace

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
)

from megatron_cp.config.recipes import list_recipes, load_recipe
from megatron_cp.models.families import model_from_hf
from megatron_cp.rules import Environment, check

recipe_named = functools.cache(load_recipe)  # no test changes one

# Meta's own model list (llama-models, models/sku_list.py): the arguments of the reference implementation.
ARCHITECTURES = {
    "llama3_8b": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    "llama3_70b": {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim_multiplier": 1.3, "multiple_of": 4096},
    "llama31_8b": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    "llama31_70b": {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim_multiplier": 1.3, "multiple_of": 4096},
    "llama31_405b": {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim_multiplier": 1.2, "multiple_of": 4096},
    "llama32_1b": {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
    "llama32_3b": {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0, "multiple_of": 256},
}
COMMON = {"n_kv_heads": 8, "vocab_size": 128256, "norm_eps": 1e-5, "rope_theta": 500000.0}

# config.json of the same models as published for the transformers library.
CONFIG_JSON = {
    "llama3_8b": {"intermediate_size": 14336, "max_position_embeddings": 8192, "factor": None, "tied": False},
    "llama3_70b": {"intermediate_size": 28672, "max_position_embeddings": 8192, "factor": None, "tied": False},
    "llama31_8b": {"intermediate_size": 14336, "max_position_embeddings": 131072, "factor": 8.0, "tied": False},
    "llama31_70b": {"intermediate_size": 28672, "max_position_embeddings": 131072, "factor": 8.0, "tied": False},
    "llama31_405b": {"intermediate_size": 53248, "max_position_embeddings": 131072, "factor": 8.0, "tied": False},
    "llama32_1b": {"intermediate_size": 8192, "max_position_embeddings": 131072, "factor": 32.0, "tied": True},
    "llama32_3b": {"intermediate_size": 8192, "max_position_embeddings": 131072, "factor": 32.0, "tied": True},
}

# Parameters in billions as counted in the model cards, to a hundredth.
PARAMETERS = {
    "llama3_8b": 8.03,
    "llama3_70b": 70.55,
    "llama31_8b": 8.03,
    "llama31_70b": 70.55,
    "llama31_405b": 405.85,
    "llama32_1b": 1.24,
    "llama32_3b": 3.21,
}

# Megatron-Bridge's pretraining recipes: world size, tp, pp, vpp, cp, sequence parallel, sequence length.
# The world size is ours where the estimated peak of Bridge's (2, 2, 32 and 256 GPUs) does not fit 80 GiB.
LAYOUTS = {
    "llama32_1b_pretrain_config": (1, 1, 1, None, 1, False, 8192),
    "llama32_3b_pretrain_config": (1, 1, 1, None, 1, False, 8192),
    "llama3_8b_pretrain_config": (8, 1, 1, None, 2, False, 8192),
    "llama3_8b_16k_pretrain_config": (16, 4, 2, None, 2, True, 16384),
    "llama3_8b_64k_pretrain_config": (32, 4, 2, None, 4, True, 65536),
    "llama3_8b_128k_pretrain_config": (64, 4, 2, None, 8, True, 131072),
    "llama3_70b_pretrain_config": (32, 4, 4, 5, 2, True, 8192),
    "llama3_70b_16k_pretrain_config": (32, 8, 2, None, 2, True, 16384),
    "llama3_70b_64k_pretrain_config": (256, 8, 4, None, 8, True, 65536),
    "llama31_8b_pretrain_config": (8, 1, 1, None, 2, False, 8192),
    "llama31_70b_pretrain_config": (128, 4, 4, 5, 2, True, 131072),
    "llama31_405b_pretrain_config": (1024, 8, 8, 2, 4, True, 131072),
}
HIERARCHICAL = {
    "llama32_1b_pretrain_hcp_config": (4, [2, 2], 8192),
    "llama3_8b_128k_hcp_config": (64, [2, 4], 131072),
    "llama3_8b_1m_hcp_config": (128, [4, 16], 1048576),
    "llama31_8b_4m_hcp_config": (16, [4, 2], 4194304),
}
# Recipes with dynamic context parallelism -> the recipe that each of them extends.
DYNAMIC = {"llama3_8b_128k_dynamic_cp_pretrain_config": "llama3_8b_128k_pretrain_config"}
SWITCH = ["model.dynamic_context_parallel=true"]


LAYOUT_OF_A_MODEL = (
    "context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "cp_comm_type",
    "hierarchical_context_parallel_sizes", "sequence_parallel", "expert_tensor_parallel_size", "seq_length",
    "cross_entropy_chunk_size", "recompute_granularity", "recompute_modules",
)  # fmt: skip


def published_ffn(dim: int, ffn_dim_multiplier: float, multiple_of: int, **_) -> int:
    """Compute the MLP's width as the reference implementation does."""
    width = int(ffn_dim_multiplier * int(2 * 4 * dim / 3))
    return math.ceil(width / multiple_of) * multiple_of


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_is_the_published_one(name):
    model = recipe_named(f"{name}_pretrain_config").model
    published, config_json = ARCHITECTURES[name], CONFIG_JSON[name]
    assert model.hidden_size == published["dim"]
    assert model.num_layers == published["n_layers"]
    assert model.num_attention_heads == published["n_heads"]
    assert model.kv_channels == published["dim"] // published["n_heads"]
    assert model.ffn_hidden_size == published_ffn(**published) == config_json["intermediate_size"]
    assert model.num_query_groups == COMMON["n_kv_heads"]
    assert model.vocab_size == COMMON["vocab_size"]
    assert model.layernorm_epsilon == COMMON["norm_eps"]
    assert model.rotary_base == COMMON["rope_theta"]
    assert model.max_position_embeddings == config_json["max_position_embeddings"]
    assert model.rope_scaling == (config_json["factor"] is not None)
    assert not model.rope_scaling or model.rope_scaling_factor == config_json["factor"]
    assert model.share_embeddings_and_output_weights == config_json["tied"]
    assert (model.normalization, model.activation_func, model.gated_linear_unit) == ("RMSNorm", "silu", True)
    assert not (model.add_bias_linear or model.add_qkv_bias or model.qk_layernorm)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_number_of_parameters_is_the_published_one(name):
    m = recipe_named(f"{name}_pretrain_config").model
    attention = m.hidden_size * m.kv_channels * 2 * (m.num_attention_heads + m.num_query_groups)
    layer = attention + 3 * m.hidden_size * m.ffn_hidden_size + 2 * m.hidden_size
    embeddings = m.vocab_size * m.hidden_size * (1 if m.share_embeddings_and_output_weights else 2)
    assert round((m.num_layers * layer + embeddings + m.hidden_size) / 1e9, 2) == PARAMETERS[name]


def test_qwen_is_the_published_one_lengthened_as_on_its_model_card():
    """The recipe must have config.json's values, and the model card's for 128K tokens."""
    m = load_recipe("qwen3_8b_128k_yarn_hcp_config").model
    _, published = model_from_hf(
        {
            "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "max_position_embeddings": 131072, "initializer_range": 0.02,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        }
    )  # fmt: skip
    assert m == replace(published, **{name: getattr(m, name) for name in LAYOUT_OF_A_MODEL})


def test_gemma_is_the_published_one():
    """The recipe must have config.json's values, and a billion parameters."""
    published = Gemma3TextConfig(
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, vocab_size=262144, max_position_embeddings=32768, sliding_window=512, query_pre_attn_scalar=256,
    )  # fmt: skip
    m = load_recipe("gemma3_1b_pretrain_config").model
    _, expected = model_from_hf(published.to_dict())
    assert m == replace(expected, **{name: getattr(m, name) for name in LAYOUT_OF_A_MODEL})
    with torch.device("meta"):
        theirs = Gemma3ForCausalLM(published)
    assert round(sum(weight.numel() for weight in theirs.parameters()) / 1e9, 1) == 1.0


def test_deepseek_is_the_published_one():
    """The recipe must have config.json's values, and 15.7 billion parameters.

    The paper has this number.
    """
    published = {
        "model_type": "deepseek_v2", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy", "rms_norm_eps": 1e-6,
        "initializer_range": 0.02, "vocab_size": 102400, "max_position_embeddings": 163840, "rope_theta": 10000,
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                         "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
    }  # fmt: skip
    m = load_recipe("deepseek_v2_lite_128k_hcp_config").model
    _, expected = model_from_hf(published)
    chosen = (*LAYOUT_OF_A_MODEL, "expert_model_parallel_size", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
    chosen += ("num_query_groups", "kv_channels")  # which latent attention does not have
    assert m == replace(expected, **{name: getattr(m, name) for name in chosen})
    with torch.device("meta"):
        theirs = DeepseekV2ForCausalLM(DeepseekV2Config(**published))
    assert round(sum(weight.numel() for weight in theirs.parameters()) / 1e9, 1) == 15.7


NEMOTRON = {
    "model_type": "nemotron_h", "vocab_size": 131072, "num_key_value_heads": 8, "head_dim": 128, "ssm_state_size": 128,
    "n_groups": 8, "mamba_num_heads": 128, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
}  # fmt: skip
NEMOTRONS = {
    "nemotron_nano_9b_v2_128k_dynamic_cp_pretrain_config": (8.89, NEMOTRON | {
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "hidden_size": 4480,
        "intermediate_size": 15680, "num_attention_heads": 40, "mamba_head_dim": 80, "max_position_embeddings": 131072,
    }),
    "nemotron_3_nano_128k_dynamic_cp_pretrain_config": (31.58, NEMOTRON | {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "hidden_size": 2688,
        "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "max_position_embeddings": 262144, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    }),
    "nemotron_3_super_128k_dynamic_cp_pretrain_config": (120.67, NEMOTRON | {
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*"
        "EMEMEMEME", "hidden_size": 4096, "intermediate_size": 2688, "num_attention_heads": 32,
        "num_key_value_heads": 2, "mamba_head_dim": 64, "max_position_embeddings": 262144, "n_routed_experts": 512,
        "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024, "routed_scaling_factor": 5.0, "norm_topk_prob": True,
    }),
}  # fmt: skip
# Layers of multi-token prediction, which transformers does not build: two uses of one, attention and experts.
FURTHER = {"nemotron_3_super_128k_dynamic_cp_pretrain_config": ("/*E/*E", 2, True)}


@pytest.mark.parametrize("name", NEMOTRONS)
def test_nemotrons_are_the_published_ones(name):
    """The recipes must have config.json's values, and the reports' parameters."""
    m = recipe_named(name).model
    parameters, published = NEMOTRONS[name]
    theirs = NemotronHConfig(**published)
    _, expected = model_from_hf(theirs.to_dict())
    chosen = (*LAYOUT_OF_A_MODEL, "expert_model_parallel_size", "moe_router_load_balancing_type")
    chosen += ("dynamic_context_parallel", "sequence_packing_scheduler", "max_seqlen_per_dp_cp_rank")
    chosen += ("pipeline_model_parallel_size",)
    ahead, expected.mtp_num_layers, expected.mtp_use_repeated_layer = FURTHER.get(name, ("", None, False))
    expected.hybrid_layer_pattern += ahead
    assert m == replace(expected, **{name: getattr(m, name) for name in chosen})
    with torch.device("meta"):
        built = NemotronHForCausalLM(theirs)
    assert round(sum(weight.numel() for weight in built.parameters()) / 1e9, 2) == parameters


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_and_schedule_are_bridges(name):
    c = recipe_named(name)
    m = c.model
    assert (
        c.recipe_world_size,
        m.tensor_model_parallel_size,
        m.pipeline_model_parallel_size,
        m.virtual_pipeline_model_parallel_size,
        m.context_parallel_size,
        m.sequence_parallel,
        c.dataset.seq_length,
    ) == LAYOUTS[name]
    assert m.account_for_embedding_in_pipeline_split == (name == "llama31_405b_pretrain_config")
    assert (c.train.train_iters, c.train.global_batch_size, c.train.micro_batch_size) == (1168251, 512, 1)
    assert (c.optimizer.optimizer, c.optimizer.lr, c.optimizer.min_lr) == ("adam", 3e-4, 3e-5)
    assert (c.scheduler.lr_decay_style, c.scheduler.lr_warmup_iters) == ("cosine", 2000)
    assert (c.validation.eval_interval, c.validation.eval_iters) == (2000, 32)
    assert (c.checkpoint.save_interval, c.train.manual_gc_interval, c.dataset.split) == (500, 100, "9999,8,2")
    assert (c.tokenizer.tokenizer_type, c.rng.seed) == ("NullTokenizer", 1234)


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_hierarchical_recipes(name):
    c = recipe_named(name)
    world_size, sizes, seq_length = HIERARCHICAL[name]
    assert c.model.cp_comm_type == "a2a+p2p" and c.model.hierarchical_context_parallel_sizes == sizes
    assert c.model.context_parallel_size == math.prod(sizes)
    assert (c.recipe_world_size, c.dataset.seq_length) == (world_size, seq_length)
    assert sizes[0] * c.model.tensor_model_parallel_size <= 8  # the all-to-all stays inside a node


def test_every_llama_recipe_is_held_against_something_published():
    named = {name for name in list_recipes() if name.startswith("llama3") and "_sft_" not in name}
    assert named == set(LAYOUTS) | set(HIERARCHICAL) | set(DYNAMIC)


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_recipes_differ_from_published_ones_only_in_packing(name):
    changed = asdict(recipe_named(name))
    plain = asdict(load_recipe(DYNAMIC[name], [*SWITCH, "dataset.mock_lengths=documents"]))
    for config in (changed, plain):
        config.pop("recipe")
        config.pop("checkpoint")
    assert changed == plain
    assert changed["dataset"]["kind"] == "mock_documents"
    assert changed["model"]["sequence_packing_scheduler"] == "default_dynamic_cp"


@pytest.mark.parametrize("name", list_recipes())
@pytest.mark.parametrize("environment", ["gpu", "cpu"])
def test_every_recipe_passes_the_rules_at_its_own_size(name, environment):
    config = recipe_named(name)
    violations = check(config, config.recipe_world_size, environment=environment)
    assert [v for v in violations if v.severity == "error"] == []
    if config.recipe.startswith("llama3"):
        assert violations == []


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_can_be_made_small_enough_for_a_cpu(name):
    overrides = [
        "model.num_layers=4",
        "model.moe_layer_freq=1",
        "model.tensor_model_parallel_size=1",
        "model.pipeline_model_parallel_size=1",
        "model.virtual_pipeline_model_parallel_size=null",
        "model.account_for_embedding_in_pipeline_split=false",
        "model.account_for_loss_in_pipeline_split=false",
        "model.sequence_parallel=false",
        "model.expert_model_parallel_size=1",
        "dataset.seq_length=256",
    ]
    if NEMOTRONS.get(name):
        pattern = ("ME*E" if "nemotron_3" in name else "M-*M") + FURTHER.get(name, ("",))[0]
        overrides.append(f"model.hybrid_layer_pattern={pattern}")
    config = load_recipe(name, overrides)
    violations = check(config, config.model.context_parallel_size, environment=Environment())
    assert [v for v in violations if v.severity == "error"] == []
