"""Settings that fail late or have another meaning are refused, and the fix works."""

from __future__ import annotations

import pytest

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.recipes import load_recipe
from megatron_cp.config.run_config import RunConfig
from megatron_cp.config.schema import describe, field_paths, kind_of
from megatron_cp.rules import Example, check
from megatron_cp.rules.explain import EXAMPLE_RECIPE
from megatron_cp.rules.proposals import divisors
from megatron_cp.rules.remedies import parse_fix
from tests.unit_tests.rules.remedies import failures_of, recipes_are_composed_once  # noqa: F401  (a fixture)

ONE_RANK = ("parallel=none",)
EXPERTS = ("model.num_moe_experts=4",)
LATENT = ("model.multi_latent_attention=true",)
INDEXED = ("dataset.data_path=corpus",)
NULL = ("tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=512")
TWO_TENSOR_RANKS = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")
YARN = (
    "model.position_embedding_type=yarn",
    "model.yarn_original_max_position_embeddings=4096",
    "model.yarn_rotary_scaling_factor=4.0",
)
LONG = ("model.dynamic_context_parallel=true", "train.micro_batch_size=1", "dataset.mock_lengths=long")
SINKHORN = ("model.moe_router_load_balancing_type=sinkhorn", *EXPERTS, *ONE_RANK)

# What was accepted once, and ended in set-up or the first step, or did something else: the overrides, the rule and the
# setting that are named, and one of the remedies.
REFUSED = [
    (["scheduler.end_weight_decay=0.3"], "I9", "scheduler.weight_decay_incr_style=linear"),
    (["scheduler.end_weight_decay=0.3"], "I9", "scheduler.start_weight_decay=0.3"),
    (["scheduler.start_weight_decay=0.3"], "I9", "scheduler.end_weight_decay=0.3"),
    (["optimizer.weight_decay=-0.1"], "I9", "optimizer.weight_decay=0.0"),
    (["optimizer.lr=-1"], "I9", "optimizer.lr=3e-4"),
    (["optimizer.lr=1e-6"], "I9", "optimizer.min_lr=0.0"),
    (["scheduler.lr_warmup_init=1"], "I9", "scheduler.lr_warmup_init=0.0"),
    (["scheduler.lr_warmup_iters=-1"], "I9", "scheduler.lr_warmup_iters=9"),
    (["scheduler.lr_warmup_iters=0", "scheduler.lr_warmup_fraction=1.0"], "I9", "scheduler.lr_warmup_fraction=0.1"),
    (["scheduler.lr_warmup_fraction=0.5"], "I9", "scheduler.lr_warmup_iters=0"),
    (["scheduler.lr_warmup_fraction=0.5"], "I9", "scheduler.lr_warmup_fraction=null"),
    (["scheduler.lr_decay_iters=0"], "I9", "scheduler.lr_decay_iters=null"),
    (["scheduler.lr_decay_iters=1"], "I9", "scheduler.lr_warmup_iters=0"),
    (["scheduler.lr_decay_style=WSD"], "I9", "scheduler.lr_wsd_decay_iters=1"),
    (["scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_iters=0"], "I9", "scheduler.lr_wsd_decay_iters=1"),
    (["scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_iters=99", "scheduler.lr_warmup_iters=6",
      "scheduler.lr_decay_iters=40"], "I9", "scheduler.lr_wsd_decay_iters=34"),
    (["dist.eval_context_parallel_size=-2"], "H6", "dist.eval_context_parallel_size=null"),
    (["dist.distributed_timeout_minutes=1e300"], "K51", "dist.distributed_timeout_minutes=10"),
    ([f"model.num_attention_heads={10**11}", "model.kv_channels=16"], "A1", "model.num_attention_heads=4"),
    (["model.num_attention_heads=6", "model.num_query_groups=1", "model.tensor_model_parallel_size=3", "parallel=none",
      "model.hidden_size=96", "model.ffn_hidden_size=96", "model.kv_channels=16"], "A5", "model.kv_channels=18"),
    ([*EXPERTS, "model.moe_router_topk=1"], "K15", "model.moe_router_pre_softmax=true"),
    ([*EXPERTS, "model.moe_router_enable_expert_bias=true"], "K15", "model.moe_router_enable_expert_bias=false"),
    ([*TWO_TENSOR_RANKS, *EXPERTS, "model.add_bias_linear=true"], "K15", "model.expert_tensor_parallel_size=1"),
    ([*TWO_TENSOR_RANKS, *EXPERTS, "model.add_bias_linear=true"], "K15", "model.add_bias_linear=false"),
    ([*EXPERTS, "model.add_bias_linear=true", "model.moe_shared_expert_intermediate_size=32"], "K15",
     "model.add_bias_linear=false"),
    ([*EXPERTS, "model.add_bias_linear=true", "model.moe_latent_size=32"], "K15", "model.add_bias_linear=false"),
    (["model.activation_func_clamp_value=0.0"], "K51", "model.activation_func_clamp_value=null"),
    ([*EXPERTS, "model.moe_router_group_topk=1"], "K15", "model.moe_router_group_topk=null"),
    ([*EXPERTS, "model.moe_router_group_topk=1", "model.moe_router_num_groups=3"], "K15",
     "model.moe_router_num_groups=2"),
    ([*EXPERTS, "model.moe_router_group_topk=3", "model.moe_router_num_groups=4"], "K15",
     "model.moe_router_group_topk=2"),
    ([*EXPERTS, "model.moe_router_group_topk=1", "model.moe_router_num_groups=4"], "K15",
     "model.moe_router_group_topk=2"),
    ([*EXPERTS, "model.moe_layer_freq=0"], "K15", "model.moe_layer_freq=1"),
    ([*EXPERTS, "model.moe_layer_freq=[0,0,0,0]"], "K15", "model.num_moe_experts=null"),
    ([*EXPERTS, "model.moe_layer_freq=[0,1,1,2]"], "K15", "model.moe_layer_freq=[0,1,1,1]"),
    ([*TWO_TENSOR_RANKS, *EXPERTS, "model.moe_layer_freq=2", "model.ffn_hidden_size=97",
      "model.moe_ffn_hidden_size=32"], "K31", "model.ffn_hidden_size=98"),
    ([*EXPERTS, "model.moe_router_topk_scaling_factor=0.0"], "K30", "model.moe_router_topk_scaling_factor=null"),
    ([*EXPERTS, "model.moe_z_loss_coeff=-1.0"], "K30", "model.moe_z_loss_coeff=null"),
    ([*SINKHORN, "model.moe_aux_loss_coeff=0.01"], "K15", "model.moe_aux_loss_coeff=0.0"),
    ([*TWO_TENSOR_RANKS, "model.ffn_hidden_size=97"], "K31", "model.ffn_hidden_size=98"),
    ([*TWO_TENSOR_RANKS, *EXPERTS, "model.moe_ffn_hidden_size=33"], "K31", "model.moe_ffn_hidden_size=34"),
    ([*TWO_TENSOR_RANKS, *EXPERTS, "model.moe_shared_expert_intermediate_size=33"], "K31",
     "model.moe_shared_expert_intermediate_size=34"),
    ([*EXPERTS, "model.moe_shared_expert_intermediate_size=0"], "A1", "model.moe_shared_expert_intermediate_size=1"),
    ([*TWO_TENSOR_RANKS, *EXPERTS, "model.ffn_hidden_size=33"], "K31", "model.ffn_hidden_size=32"),
    ([*TWO_TENSOR_RANKS, *LATENT, "model.q_lora_rank=33"], "K24", "model.q_lora_rank=32"),
    ([*TWO_TENSOR_RANKS, *LATENT, "model.kv_lora_rank=33", "model.qk_pos_emb_head_dim=16"], "K24",
     "model.kv_lora_rank=32"),
    ([*TWO_TENSOR_RANKS, *LATENT, "model.kv_lora_rank=1"], "K24", "model.kv_lora_rank=2"),
    ([*LATENT, "model.qk_pos_emb_head_dim=15"], "K17", "model.qk_pos_emb_head_dim=16"),
    ([*LATENT, "model.qk_pos_emb_head_dim=30", "model.rotary_percent=0.5"], "K17", "model.qk_pos_emb_head_dim=32"),
    ([*LATENT, "model.rotary_interleaved=true"], "K17", "model.rotary_interleaved=false"),
    ([*LATENT, "model.softmax_scale=0.9"], "K19", "model.softmax_scale=null"),
    ([*LATENT, "model.rope_scaling=true"], "K19", "model.rope_scaling=false"),
    ([*LATENT, "model.rope_scaling_factor=32"], "K19", "model.rope_scaling_factor=8.0"),
    ([*LATENT, "model.seq_len_interpolation_factor=4"], "K19", "model.seq_len_interpolation_factor=null"),
    ([*LATENT, "model.window_size=[8,0]", "model.rotary_base_local=10000"], "K19", "model.rotary_base_local=null"),
    ([*LATENT, "model.add_qkv_bias=true"], "K19", "model.add_qkv_bias=false"),
    ([*LATENT, "model.position_embedding_type=none"], "K19", "model.position_embedding_type=rope"),
    ([*LATENT, "model.position_embedding_type=learned_absolute"], "K19", "model.position_embedding_type=rope"),
    ([*LATENT, *YARN, "model.rotary_percent=0.5"], "K19", "model.rotary_percent=1.0"),
    ([*LATENT, *YARN, "model.yarn_correction_range_round_to_int=false"], "K19",
     "model.yarn_correction_range_round_to_int=true"),
    ([*LATENT, *YARN, "model.yarn_original_max_position_embeddings=4098"], "K55",
     "model.yarn_original_max_position_embeddings=4096"),
    ([*YARN[:2]], "K55", YARN[2]),
    ([*YARN[::2]], "K55", YARN[1]),
    ([*YARN, "model.rope_scaling=true"], "K55", "model.rope_scaling=false"),
    ([*YARN, "model.seq_len_interpolation_factor=2.0"], "K55", "model.seq_len_interpolation_factor=null"),
    ([*YARN, "model.window_size=[8,0]", "model.rotary_base_local=10000"], "K55", "model.rotary_base_local=null"),
    ([*YARN, "model.yarn_beta_fast=1.0"], "K55", "model.yarn_beta_fast=32.0"),
    ([*YARN, "model.yarn_beta_slow=0.0"], "K51", "model.yarn_beta_slow=1.0"),
    ([*YARN, "model.kv_channels=15"], "K17", "model.kv_channels=16"),
    (["dataset.reset_position_ids=true"], "E9", "dataset.reset_position_ids=false"),
    ([*LATENT, "dataset.reset_position_ids=true"], "E9", "dataset.reset_position_ids=false"),
    (["model.position_embedding_type=none", "dataset.reset_position_ids=true"], "E9",
     "dataset.reset_position_ids=false"),
    (["model.multi_latent_attention=true", "model.qk_head_dim=8", "model.qk_pos_emb_head_dim=4",
      "model.v_head_dim=16", "dist.eval_context_parallel_size=1"], "K37", "model.v_head_dim=12"),
    (["model.window_size=[8,0]", "model.window_attn_skip_freq=0"], "K12", "model.window_attn_skip_freq=null"),
    (["model.window_size=[8,0]", "model.window_attn_skip_freq=[1,0,2,1]"], "K12",
     "model.window_attn_skip_freq=[1,0,1,1]"),
    (["optimizer.adam_eps=0"], "K30", "optimizer.adam_eps=1e-08"),
    (["train.manual_gc=true", "train.manual_gc_interval=-1"], "K30", "train.manual_gc_interval=0"),
    (["model.window_size=[8,0]", "model.window_attn_skip_freq=[1,0,1,0]", "model.mtp_num_layers=5"], "K12",
     "model.mtp_num_layers=4"),
    (["model.position_embedding_type=yarn", "model.yarn_rotary_scaling_factor=4.0",
      "model.yarn_original_max_position_embeddings=256", "model.rotary_base=1.5"], "K55", "model.rotary_base=10000.0"),
    (["model.seq_len_interpolation_factor=0"], "K51", "model.seq_len_interpolation_factor=null"),
    (["model.softmax_scale=0.0"], "K51", "model.softmax_scale=null"),
    (["model.softmax_scale=-1"], "K51", "model.softmax_scale=null"),
    (["model.rope_scaling_factor=0"], "K51", "model.rope_scaling_factor=8.0"),
    (["mixed_precision.loss_scale=0.0"], "K51", "mixed_precision.loss_scale=null"),
    (["mixed_precision.initial_loss_scale=-1.0"], "K51", "mixed_precision.initial_loss_scale=4294967296.0"),
    (["mixed_precision.min_loss_scale=0.0"], "K51", "mixed_precision.min_loss_scale=1.0"),
    (["mixed_precision.loss_scale_window=0"], "K30", "mixed_precision.loss_scale_window=1000"),
    (["mixed_precision.hysteresis=0"], "K30", "mixed_precision.hysteresis=2"),
    (["mixed_precision.fp16=true", "ddp.check_for_nan_in_grad=false", "mixed_precision.min_loss_scale=2.0",
      "mixed_precision.initial_loss_scale=1.0"], "K13", "mixed_precision.initial_loss_scale=2.0"),
    (["validation.eval_interval=0"], "K51", "validation.eval_interval=null"),
    (["optimizer.adam_beta1=1.0"], "K16", "optimizer.adam_beta1=0.9"),
    (["optimizer.adam_beta2=-0.1"], "K16", "optimizer.adam_beta2=0.95"),
    (["rng.seed=-1"], "K30", "rng.seed=1234"),
    ([f"rng.seed={2**31}"], "K30", "rng.seed=1234"),
    (["dataset.random_seed=-1"], "K30", "dataset.random_seed=1234"),
    (["dataset.num_workers=-1"], "K30", "dataset.num_workers=0"),
    (["validation.eval_iters=-1"], "K30", "validation.eval_iters=0"),
    (["validation.eval_micro_batch_size=-2"], "K30", "validation.eval_micro_batch_size=null"),
    (["model.init_method_std=-0.1"], "K30", "model.init_method_std=0.02"),
    (["checkpoint.save=''"], "K53", "checkpoint.save=null"),
    (["checkpoint.load=''"], "K53", "checkpoint.load=null"),
    (["checkpoint.most_recent_k=0"], "K53", "checkpoint.most_recent_k=-1"),
    (["checkpoint.most_recent_k=-7"], "K53", "checkpoint.most_recent_k=-1"),
    (["dataset.split='a,b,c'"], "K32", "dataset.split='98,1,1'"),
    (["dataset.kind=mock", "dataset.data_path=corpus"], "K54", "dataset.kind=indexed"),
    (["dataset.kind=mock", "dataset.data_path=corpus"], "K54", "dataset.data_path=null"),
    (["dataset.data_path=[1e308,a,1e308,b]"], "K58", "dataset.data_path=[a,b]"),
    (["dataset.data_path=[1,a,'nan',b]"], "K58", "dataset.data_path=[a,b]"),
    (["dataset.data_path=[a,1,b,1]"], "K58", "dataset.data_path=[a,b]"),
    ([*INDEXED, "dataset.valid_data_path=[0,a]", "validation.eval_iters=2"], "K58", "dataset.valid_data_path=[a]"),
    ([*INDEXED, "dataset.valid_data_path=a", "dataset.test_data_path=[inf2,1]", "validation.eval_iters=2"], "K58",
     "dataset.test_data_path=[inf2]"),
    (["dataset.kind=mock", "dataset.eod_mask_loss=true"], "K54", "dataset.eod_mask_loss=false"),
    (["dataset.split='0,0,0'"], "K32", "dataset.split='98,1,1'"),
    (["dataset.split='\u0663,1,1'"], "K32", "dataset.split='98,1,1'"),
    ([f"dataset.split='{'9' * 400},1,1'"], "K32", "dataset.split='98,1,1'"),
    (["dataset.split='1,2,3,4'"], "K32", "dataset.split='98,1,1'"),
    (["dataset.split='-1,2,3'"], "K32", "dataset.split='98,1,1'"),
    ([*INDEXED, "dataset.split='0,1,1'"], "K32", "dataset.split='98,1,1'"),
    ([*INDEXED, "dataset.split='1'", "validation.eval_iters=2"], "K32", "validation.eval_iters=0"),
    ([*INDEXED, "dataset.test_data_path=held_out", "validation.eval_iters=2"], "K32", "dataset.valid_data_path=PATH"),
    ([*INDEXED, "dataset.test_data_path=held_out", "validation.eval_iters=2"], "K32", "validation.eval_iters=0"),
    (["dataset.valid_data_path=held_out", "validation.eval_iters=2"], "K54", "dataset.valid_data_path=null"),
    (["tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=512", "model.vocab_size=300"], "K11",
     "model.vocab_size=512"),
    ([*NULL, *INDEXED, "dataset.eod_mask_loss=true"], "K36", "tokenizer.eod_id=0"),
    ([*NULL, *INDEXED, "dataset.eod_mask_loss=true"], "K36", "dataset.eod_mask_loss=false"),
    ([*NULL, *INDEXED, "model.position_embedding_type=learned_absolute", "dataset.reset_position_ids=true"], "K36",
     "tokenizer.eod_id=0"),
    ([*NULL, "tokenizer.eod_id=512"], "K36", "tokenizer.eod_id=511"),
    ([*NULL, "tokenizer.eod_id=-1"], "K36", "tokenizer.eod_id=0"),
    (["train.skip_train=true", "validation.eval_iters=0"], "K54", "train.skip_train=false"),
    (["tokenizer.eod_id=2"], "K36", "tokenizer.eod_id=null"),
    (["env_vars.NCCL_ALGO=\"'a\0b'\""], "K59", "env_vars.NCCL_ALGO=1"),
    ([*LONG, "dataset.seq_length=8191"], "K26", "dataset.seq_length=8192"),
    ([*LONG, "dataset.seq_length=4096"], "K26", "dataset.mock_lengths=lognormal"),
]  # fmt: skip


def world_size_of(overrides):
    return load_recipe(EXAMPLE_RECIPE, overrides).model.fewest_ranks


@pytest.mark.parametrize(("overrides", "rule", "remedy"), REFUSED, ids=str)
def test_failing_or_ignored_settings_are_refused_once_with_a_working_fix(overrides, rule, remedy):
    def errors(*more):
        config = load_recipe(EXAMPLE_RECIPE, [*overrides, *more])
        return [v for v in check(config, world_size_of(overrides), environment="cpu") if v.severity == "error"]

    (found,) = errors()
    setting, _, value = remedy.partition("=")
    assert found.rule == rule and value.strip("'") in found.fix
    assert setting == found.field or remedy in found.fix
    assert errors(remedy) == []
    assert failures_of(Example(tuple(overrides), world_size_of(overrides))) == []


def test_experts_that_are_spread_have_one_loss_scale_with_the_rest():
    spread = [*EXPERTS, "model.expert_model_parallel_size=2", "ddp.check_for_nan_in_grad=false"]
    assert set(errors(*spread, "mixed_precision=fp16_mixed")) == {"K13"}
    assert errors(*spread, "mixed_precision=bf16_mixed") == {}
    assert errors(*EXPERTS, "ddp.check_for_nan_in_grad=false", "mixed_precision=fp16_mixed") == {}


def test_a_loss_scale_without_fp16_warns():
    setting = "mixed_precision.initial_loss_scale=256"
    (found,) = check(load_recipe(EXAMPLE_RECIPE, [setting]), 4, environment="cpu")
    assert (found.rule, found.severity, found.value) == ("K13", "warning", 256)
    fp16 = ["mixed_precision.fp16=true", "ddp.check_for_nan_in_grad=false"]
    assert check(load_recipe(EXAMPLE_RECIPE, [setting, *fp16]), 4, environment="cpu") == []
    for overrides in (["mixed_precision=fp16_mixed", setting], [setting, "mixed_precision=fp16_mixed"]):
        config = load_recipe(EXAMPLE_RECIPE, overrides).mixed_precision
        assert config.fp16 and config.initial_loss_scale == 256


def test_an_evaluation_without_data_warns():
    config = load_recipe(EXAMPLE_RECIPE, ["validation.eval_interval=5"])
    (found,) = check(config, 4, environment="cpu")
    assert (found.rule, found.severity, found.field) == ("K54", "warning", "validation.eval_interval")
    more = ["validation.eval_interval=5", "validation.eval_iters=10"]
    assert check(load_recipe(EXAMPLE_RECIPE, more), 4, environment="cpu") == []


def test_one_expert_of_several_is_a_matter_of_experts_alone():
    assert errors("model.moe_router_topk=1") == {}
    assert errors("model.moe_router_topk=1", *EXPERTS, "model.moe_router_score_function=sigmoid") == {}
    assert errors("model.moe_router_topk=1", *SINKHORN, world_size=1) == {}


def test_a_shortened_warmup_warns():
    config = load_recipe(EXAMPLE_RECIPE, ["train.train_iters=5", "scheduler.lr_warmup_iters=100"])
    (found,) = check(config, 4, environment="cpu")
    assert (found.rule, found.severity, found.value) == ("I9", "warning", 100)
    assert "the warmup ends after 4" in found.message
    for remedy in ("scheduler.lr_warmup_iters=4", "scheduler.lr_decay_iters=101"):
        assert remedy in found.fix
        more = ["train.train_iters=5", "scheduler.lr_warmup_iters=100", remedy]
        assert check(load_recipe(EXAMPLE_RECIPE, more), 4, environment="cpu") == []


def test_a_warmup_flag_beside_a_recipes_fraction_is_refused(tmp_path):
    """The fraction would take precedence, and the typed value would have no effect."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: [{EXAMPLE_RECIPE}, _self_]\nscheduler: {{lr_warmup_fraction: 0.5, lr_warmup_iters: 0}}\n"
    )
    assert check(load_recipe(path), 4, environment="cpu") == []
    (found,) = check(load_recipe(path, flags={"scheduler.lr_warmup_iters": 3}), 4, environment="cpu")
    assert found.message == "Can only specify one of lr_warmup_fraction or lr_warmup_iters, got 0.5 and 3"


@pytest.mark.parametrize(
    ("setting", "default"),
    [("recompute_method=uniform", "null"), ("recompute_num_layers=1", "null"), ("recompute_modules=[mlp]", "null"),
     ("distribute_saved_activations=true", "false")],
)  # fmt: skip
def test_recomputation_settings_without_recomputation_warn(setting, default):
    (found,) = check(load_recipe(EXAMPLE_RECIPE, [f"model.{setting}"]), 4, environment="cpu")
    assert (found.rule, found.severity) == ("K7", "warning")
    assert found.field == f"model.{setting.partition('=')[0]}"
    assert parse_fix(found.fix)[0].overrides == (f"{found.field}={default}",)


WHOLE_LAYERS = ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1")


def selective(*modules):
    return "model.recompute_granularity=selective", f"model.recompute_modules=[{','.join(modules)}]"


@pytest.mark.parametrize(
    ("overrides", "environment"),
    [(["model.add_bias_linear=true", *selective("core_attn", "mlp")], "cpu"),
     (["model.add_bias_linear=true", *selective("mlp")], "gpu"),
     ([*LATENT, *selective("mla_up_proj")], "cpu")],
    ids=str,
)  # fmt: skip
def test_modules_that_cannot_be_recomputed_alone_are_refused(overrides, environment):
    """Recomputing these modules alone would never end, or would need a compiler.

    A bias comes back as an output, so the backward pass never ends. The up-projection would need a compiler.
    """
    assert errors(*selective("mlp"), environment=environment) == {}
    assert errors(*LATENT, *selective("mla_up_proj"), environment="gpu") == {}
    remedy = [*WHOLE_LAYERS, "model.recompute_modules=null"]
    assert errors(*overrides, environment=environment) == {"K7": " ".join(remedy)}
    assert errors(*overrides, *remedy, environment=environment) == {}


HYBRID = ("model.architecture=hybrid", "model.hybrid_layer_pattern=M*M*", "model.cp_comm_type=p2p",
          "model.hierarchical_context_parallel_sizes=null", "model.mamba_head_dim=16")  # fmt: skip
DISTRIBUTED = ("model.distribute_saved_activations=true", "model.tensor_model_parallel_size=2")


@pytest.mark.parametrize(
    ("overrides", "remedies"),
    [((*WHOLE_LAYERS, "dist.use_decentralized_pg=true"), ["dist.use_decentralized_pg=false"]),
     ((*WHOLE_LAYERS, *HYBRID), []),
     (("model.recompute_granularity=selective",), [])],
    ids=str,
)  # fmt: skip
def test_activations_are_distributed_of_whole_layers_in_global_groups(overrides, remedies):
    assert errors(*DISTRIBUTED, *WHOLE_LAYERS, world_size=8) == {}
    (found,) = errors(*DISTRIBUTED, *overrides, world_size=8).items()
    assert found[0] == "K7"
    for remedy in ["model.distribute_saved_activations=false", *remedies]:
        assert remedy in found[1] and errors(*DISTRIBUTED, *overrides, remedy, world_size=8) == {}


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [((*WHOLE_LAYERS, "model.recompute_modules=[mlp]"), "model.recompute_modules=null"),
     ((*selective("core_attn"), "model.recompute_method=block"), "model.recompute_method=null"),
     ((*selective("mlp"), *EXPERTS), "model.recompute_modules=[moe]")],
    ids=str,
)  # fmt: skip
def test_unused_recomputation_settings_warn(overrides, fix):
    (found,) = check(load_recipe(EXAMPLE_RECIPE, overrides), 4, environment="cpu")
    assert (found.rule, found.severity) == ("K7", "warning")
    assert [each.overrides for each in parse_fix(found.fix)] == [(fix,)]
    assert check(load_recipe(EXAMPLE_RECIPE, [*overrides, fix]), 4, environment="cpu") == []


def test_a_run_of_no_iterations_is_one_mistake():
    config = load_recipe(EXAMPLE_RECIPE, ["train.train_iters=0"])
    assert [(v.rule, v.field) for v in check(config, 4, environment="cpu")] == [("A1", "train.train_iters")]


@pytest.mark.parametrize("ranks", [0, -3])
def test_a_node_has_ranks(ranks):
    (found,) = check(load_recipe(EXAMPLE_RECIPE), 4, ranks, "cpu")
    assert (found.rule, found.field) == ("A1", "--gpus-per-node") and str(ranks) in found.message


def test_a_batch_of_less_than_one_sample_is_reported_once():
    assert list(errors("train.global_batch_size=-8")) == ["A1"]


def test_divisors_are_found_without_counting_to_the_number():
    assert [divisors(number) for number in (0, 1, 12, 36)] == [
        [],
        [1],
        [1, 2, 3, 4, 6, 12],
        [1, 2, 3, 4, 6, 9, 12, 18, 36],
    ]
    assert divisors(2**31 - 1) == [1, 2**31 - 1]


def test_a_world_has_a_size_that_can_be():
    (found,) = check(load_recipe(EXAMPLE_RECIPE), 1_000_000_007, environment="cpu")
    assert (found.rule, found.message) == ("A1", "must be at most 1000000, got 1000000007") and found.fix


def test_a_described_node_has_ranks(tmp_path):
    described = tmp_path / "nodes.yaml"
    described.write_text("device: gpu\ngpus_per_node: 0\n")
    with pytest.raises(ConfigError, match=r"A1: gpus_per_node: must be an integer of at least 1, got 0") as refused:
        check(load_recipe(EXAMPLE_RECIPE), 4, environment=str(described))
    assert str(described) in str(refused.value)


def test_sizes_of_latent_attention_are_sizes():
    names = [f"model.{name}" for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim")]
    config = load_recipe(EXAMPLE_RECIPE, [*LATENT, *(f"{name}=0" for name in names), "model.v_head_dim=-4"])
    found = check(config, 4, environment="cpu")
    assert {v.field for v in found if v.rule == "A1"} == {*names, "model.v_head_dim"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_in_a_hand_made_configuration_is_finite(value):
    config = load_recipe(EXAMPLE_RECIPE)
    config.optimizer.lr = value
    assert [(v.rule, v.field) for v in check(config, 4, environment="cpu")] == [("K2", "optimizer.lr")]


def errors(*overrides, world_size=4, environment="cpu"):
    found = check(load_recipe(EXAMPLE_RECIPE, overrides), world_size, environment=environment)
    return {v.rule: v.fix for v in found if v.severity == "error"}


INTERLEAVED = (
    "model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null", "model.context_parallel_size=1",
    "model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2", "train.micro_batch_size=1",
)  # fmt: skip


@pytest.mark.parametrize("packs", [(), ("model.dynamic_context_parallel=true",)])
def test_virtual_stages_need_at_least_one_microbatch_per_stage(packs):
    assert errors(*INTERLEAVED, *packs, "model.microbatch_group_size_per_vp_stage=2") == {}
    assert errors(*INTERLEAVED, *packs, "model.microbatch_group_size_per_vp_stage=1").keys() == {"A17"}


MOE = (
    "model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null", "model.context_parallel_size=1",
    "model.num_moe_experts=4", "train.micro_batch_size=1",
)  # fmt: skip
SPLIT = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")


def test_experts_that_are_split_and_spread_need_nccl():
    both = (*MOE, *SPLIT, "model.expert_model_parallel_size=2", "mixed_precision=bf16")
    assert errors(*both) == {"K29": "model.expert_tensor_parallel_size=1"}
    assert errors(*both, environment="gpu") == {}
    assert errors(*both, "dist.distributed_backend=staged", environment="gpu").keys() == {"K29"}
    assert errors(*both, "model.expert_tensor_parallel_size=1") == {}
    assert errors(*both, "model.moe_token_dispatcher_type=allgather") == {}
    assert errors(*MOE, *SPLIT) == {}
    across = (*MOE, "model.expert_tensor_parallel_size=2", "mixed_precision=bf16")
    packs = ("model.dynamic_context_parallel=true", "dataset.kind=mock_documents")
    assert errors(*across) == {}
    assert errors(*across, *packs) == {"K29": "model.expert_tensor_parallel_size=1"}
    assert errors(*across, *packs, environment="gpu") == {}


def test_packs_of_evaluation_need_the_alltoall_dispatcher_too():
    gathered = (*MOE, "model.moe_token_dispatcher_type=allgather")
    assert errors(*gathered) == {}
    for packs in ("model.dynamic_context_parallel=true", "dist.eval_context_parallel_size=2"):
        assert errors(*gathered, packs) == {"H22": "model.moe_token_dispatcher_type=alltoall"}


def test_sinkhorn_needs_whole_sequences():
    sinkhorn = (*MOE, "model.moe_router_load_balancing_type=sinkhorn", "model.moe_router_topk=1")
    assert errors(*sinkhorn) == {}
    assert errors(*sinkhorn, *SPLIT).keys() == {"K22"}
    assert errors(*sinkhorn, "model.dynamic_context_parallel=true").keys() == {"H18"}


def test_one_replica_balances_the_global_batch():
    balanced = (*MOE, "model.moe_router_load_balancing_type=global_aux_loss", "model.moe_aux_loss_coeff=0.01")
    assert errors(*balanced) == {
        "K33": "model.moe_router_load_balancing_type=aux_loss, or model.moe_router_load_balancing_type=seq_aux_loss"
    }
    for remedy in ("model.moe_router_load_balancing_type=aux_loss", "model.moe_aux_loss_coeff=0.0"):
        assert errors(*balanced, remedy) == {}
    assert errors(*balanced, "model.moe_router_load_balancing_type=seq_aux_loss") == {}
    for one_replica in ("model.context_parallel_size=4", "model.pipeline_model_parallel_size=4"):
        assert errors(*balanced, one_replica) == {}
    assert errors(*balanced, "model.dynamic_context_parallel=true").keys() == {"H18"}


@pytest.mark.parametrize(
    ("cp", "heads", "levels"),
    [(3, 8, []), (3, 9, []), (12, 8, ["[2,6]", "[4,3]"]), (4, 9, []), (4, 8, ["[2,2]"])],
)
def test_the_levels_proposed_fit_the_heads(cp, heads, levels):
    """No level may have one rank: that is a plain transport."""
    overrides = [f"model.context_parallel_size={cp}", f"model.num_attention_heads={heads}", "dataset.seq_length=288"]
    overrides += [f"model.num_query_groups={heads}", f"model.hidden_size={heads * 16}"]
    found = errors(*overrides, "model.hierarchical_context_parallel_sizes=[5,1]", world_size=cp)
    proposed = parse_fix(found.pop("C5"))
    assert not found
    assert [str(fix) for fix in proposed[: len(levels)]] == [
        f'"model.hierarchical_context_parallel_sizes={sizes}"' for sizes in levels
    ]
    assert proposed[len(levels)].overrides == (
        "model.cp_comm_type=p2p",
        "model.hierarchical_context_parallel_sizes=null",
    )
    for fix in proposed:
        assert errors(*overrides, *fix.overrides, world_size=cp) == {}


K21 = "model.cross_entropy_loss_fusion=false, or mixed_precision=bf16_mixed"
NATIVE = ("model.attention_backend=native",)


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "on_gpu"),
    [
        ((), {}, {}),
        (("model.apply_rope_fusion=true",), {"K34": "model.apply_rope_fusion=null"}, {}),
        (("model.apply_rope_fusion=true", *NATIVE), {"K34": "model.apply_rope_fusion=null"}, {}),
        (
            ("model.gradient_accumulation_fusion=true", "model.transformer_impl=local"),
            {"K34": "model.gradient_accumulation_fusion=null"},
            {"K34": "model.gradient_accumulation_fusion=null"},
        ),
        (("model.gradient_accumulation_fusion=true",), {"K34": "model.gradient_accumulation_fusion=null"}, {}),
        (
            ("model.cross_entropy_loss_fusion=true", "model.cross_entropy_fusion_impl=te"),
            {"K34": "model.cross_entropy_fusion_impl=null model.cross_entropy_loss_fusion=false"},
            {},
        ),
        (("model.cross_entropy_loss_fusion=true",), {"K21": K21}, {}),
        (("model.cross_entropy_loss_fusion=true", "mixed_precision=bf16"), {}, {}),
        (("model.cross_entropy_loss_fusion=true", "mixed_precision.fp32=true"), {"K21": K21}, {"K21": K21}),
        (("model.deterministic_mode=true", "env_vars.NVTE_ALLOW_NONDETERMINISTIC_ALGO='0'"), {}, {}),
    ],
    ids=str,
)
def test_missing_fused_kernels_are_refused(overrides, on_cpu, on_gpu):
    assert errors(*overrides) == on_cpu
    assert errors(*overrides, environment="gpu") == on_gpu


def test_a_scaling_factor_below_one_shortens():
    assert set(errors(*YARN, "model.yarn_rotary_scaling_factor=0.5")) == {"K30"}


def test_yarn_for_fewer_positions_than_the_sequence_warns():
    few = [*YARN[:1], "model.yarn_original_max_position_embeddings=100", "model.yarn_rotary_scaling_factor=2.0"]
    (found,) = check(load_recipe(EXAMPLE_RECIPE, few), 4, environment="cpu")
    fix = "model.yarn_rotary_scaling_factor=3.0 model.max_position_embeddings=300"
    assert (found.rule, found.severity, found.fix) == ("K55", "warning", fix)
    assert check(load_recipe(EXAMPLE_RECIPE, [*few, *fix.split()]), 4, environment="cpu") == []


def test_concentrated_yarn_has_no_fused_rotary_embedding():
    """Transformer Engine's kernel leaves the factor out, of packs silently."""
    plain = ["model.yarn_mscale=0.0", "model.yarn_mscale_all_dim=0.0"]
    asked = "model.apply_rope_fusion=true"
    assert errors(*YARN, asked, environment="gpu") == {"K34": "model.apply_rope_fusion=null"}
    assert errors(*YARN, environment="gpu") == errors(*YARN, *plain, asked, environment="gpu") == {}


def test_latent_attention_has_no_fused_rotary_embedding():
    found = errors(*LATENT, "model.apply_rope_fusion=true", environment="gpu")
    assert found == {"K34": "model.apply_rope_fusion=null"}
    assert errors(*LATENT, environment="gpu") == {}
    # Upstream's for YaRN reads rows of another table, where sequences are shorter than the original ones.
    assert errors(*LATENT, *YARN, "model.apply_rope_fusion=true", environment="gpu") == found
    assert errors(*LATENT, *YARN, environment="gpu") == {}


def test_whose_fused_loss_has_no_effect_without_one():
    config = load_recipe(EXAMPLE_RECIPE, ["model.cross_entropy_fusion_impl=te"])
    for environment, warns in (("cpu", True), ("gpu", False)):
        warnings = [v.rule for v in check(config, 4, environment=environment) if v.severity == "warning"]
        assert ("K34" in warnings) == warns


@pytest.mark.parametrize(
    ("world_size", "overrides", "fix"),
    [
        (4, ["model.num_moe_experts=6", "model.expert_model_parallel_size=3"],
         "model.expert_model_parallel_size=2, or model.expert_model_parallel_size=1, or start 12 ranks with "
         "train.global_batch_size=48 (or a multiple of them)"),
        (60, ["model.tensor_model_parallel_size=4", "model.pipeline_model_parallel_size=2"],
         "start 32 ranks (or a multiple of them)"),
    ],
)  # fmt: skip
def test_the_experts_grid_gets_sizes_that_fit_where_there_are_any(world_size, overrides, fix):
    assert errors(*overrides, world_size=world_size)["A3"] == fix


# A number out of range in each setting that may hold a list of numbers, and the rule that refuses it.
OUT_OF_RANGE = {
    "model.window_size": ("[-2,0]", "K12"),
    "model.window_attn_skip_freq": ("[1,0,2,0]", "K12"),
    "model.moe_layer_freq": ("[1,0,-1,0]", "K15"),
    "model.no_rope_freq": ("[1,0,-1,0]", "K62"),
    "model.hierarchical_context_parallel_sizes": ("[-2,-2]", "C7"),
    "profiling.profile_ranks": ("[-1]", "K40"),
    "dataset.length_mixture": ("[0.4,8192,-1]", "K69"),
    "dataset.data_path": ("[0,a]", "K58"),
    "dataset.valid_data_path": ("[0,a]", "K58"),
    "dataset.test_data_path": ("[0,a]", "K58"),
}


def number_lists():
    """Yield settings that may be a list or mapping with numbers, by their types."""
    for path in field_paths(RunConfig):
        text = describe(kind_of(RunConfig, path))
        if "int" in text.partition("list of")[2] or "number" in text.partition(" of ")[2]:
            yield path


def test_every_number_in_a_list_is_checked():
    assert set(number_lists()) == set(OUT_OF_RANGE)
    read = ("model.num_moe_experts=4", "profiling.use_pytorch_profiler=true", "validation.eval_iters=2")
    for path, (value, rule) in OUT_OF_RANGE.items():
        window = ("model.window_size=[8,0]",) if path == "model.window_attn_skip_freq" else ()
        other = ("dataset.data_path=corpus",) if path.startswith("dataset.") else ()
        assert rule in errors(*read, *other, *window, f"{path}={value}"), path
        weights = path.startswith("dataset.")  # fractions: larger integers are floats
        for number in ("nan", "inf", "-inf", 10**309 if weights else 2**63):
            with pytest.raises(ConfigError, match=f"error K2: {path}"):
                load_recipe(EXAMPLE_RECIPE, [f"{path}=[{number},{'a' if weights else 0}]"])


MAY_RUN_CODE = """
LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT DYLD_INSERT_LIBRARIES GCONV_PATH PATH BASH_ENV ENV HOME SHELL CC CXX TMPDIR
PYTHONPATH PYTHONSTARTUP PYTHONHOME PYTHONINSPECT PYTHONBREAKPOINT PYTHONWARNINGS PYTHONUSERBASE PYTHONPLATLIBDIR
NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN NCCL_ENV_PLUGIN NCCL_CONF_FILE NCCL_DEBUG_FILE NCCL_COMM_ID
NCCL_TOPO_DUMP_FILE CUDA_INJECTION64_PATH CUDNN_LOGDEST_DBG NVTE_CUDA_INCLUDE_DIR OMP_TOOL_LIBRARIES UCX_MODULE_DIR
TRITON_LIBCUDA_PATH TRITON_PTXAS_PATH TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR TORCH_LOGS TRUST_REMOTE_CODE
TORCH_NCCL_DEBUG_INFO_TEMP_FILE HF_TOKEN HF_ENDPOINT HTTPS_PROXY https_proxy GIT_SSH_COMMAND WANDB_BASE_URL
WANDB_API_KEY RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID SLURM_PROCID
MEGATRON_CP_STOP_SECONDS nccl_algo XNCCL_ALGO NCCL_A=B
"""
TUNES = """
NCCL_ALGO NCCL_SOCKET_IFNAME NCCL_P2P_DIRECT_DISABLE NCCL_IB_HCA TORCH_NCCL_AVOID_RECORD_STREAMS UB_SKIPMC
NVTE_FUSED_ATTN NVTE_FWD_LAYERNORM_SM_MARGIN OMP_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS GLOO_SOCKET_IFNAME
PYTORCH_CUDA_ALLOC_CONF CUBLAS_WORKSPACE_CONFIG WANDB_MODE
"""


@pytest.mark.parametrize("name", [*MAY_RUN_CODE.split(), "", "NCCL_A\0", "NCCL_A\n"])
def test_variables_that_may_run_code_are_refused(name):
    config = load_recipe(EXAMPLE_RECIPE)
    config.env_vars = {name: "1"}
    (found,) = check(config, 4, environment="cpu")
    assert (found.rule, found.severity, found.field) == ("K59", "error", f"env_vars.{name}")
    assert f"export {name}=VALUE" in found.fix


def test_variables_that_tune_are_fine():
    config = load_recipe(EXAMPLE_RECIPE)
    config.env_vars = dict.fromkeys(TUNES.split(), "1")
    assert check(config, 4, environment="cpu") == []
