"""Settings that have no effect while another one is off warn, only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_cp.config.recipes import list_recipes, load_recipe
from megatron_cp.config.run_config import RunConfig, settings
from megatron_cp.config.schema import alternatives, kind_of
from megatron_cp.rules import Example, check
from megatron_cp.rules.explain import EXAMPLE_RECIPE
from megatron_cp.rules.remedies import parse_fix, setting_of, with_overrides
from megatron_cp.rules.resolve import ranks_to_check
from tests.unit_tests.rules.remedies import failures_of, recipes_are_composed_once  # noqa: F401  (a fixture)

CONFIGS = Path(__file__).parents[3] / "configs"
FLAT = ("model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null", "train.micro_batch_size=1")
LATENT = "model.multi_latent_attention=true"
HYBRID = "model.architecture=hybrid model.hybrid_layer_pattern=M*M* model.num_layers=4"
PACKS = "model.sequence_packing_scheduler=dp_balanced"
YARN = "model.position_embedding_type=yarn"
EXPERTS = "model.num_moe_experts=4"

# The setting, overrides of both cases, and the override that makes the setting effective.
UNUSED = [
    ("model.rope_scaling_factor=32.0", "", "model.rope_scaling=true"),
    *[(f"model.{setting}", "model.position_embedding_type=none", "model.position_embedding_type=rope")
      for setting in ("rotary_base=500000.0", "rotary_percent=0.5", "rotary_interleaved=true", "rope_scaling=true",
                      "seq_len_interpolation_factor=4.0")],
    ("model.rotary_base_local=10000.0", "model.position_embedding_type=none model.window_size=[8,0]",
     "model.position_embedding_type=rope"),
    ("model.rotary_base_local=10000.0", "", "model.window_size=[8,0]"),
    ("model.rotary_base=500000.0", "model.position_embedding_type=learned_absolute",
     "model.position_embedding_type=rope"),
    *[(f"model.{setting}", "", YARN)
      for setting in ("yarn_rotary_scaling_factor=8.0", "yarn_original_max_position_embeddings=512",
                      "yarn_beta_fast=16.0", "yarn_beta_slow=2.0", "yarn_correction_range_round_to_int=false")],
    ("model.yarn_mscale=0.7", "", f"{YARN} model.yarn_mscale_all_dim=1.0"),
    ("model.yarn_mscale=0.7", YARN, "model.yarn_mscale_all_dim=1.0"),
    ("model.yarn_mscale_all_dim=0.7", YARN, "model.yarn_mscale=1.0"),
    *[(f"model.{name}=48", "model.num_query_groups=null", LATENT)
      for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")],
    *[(f"model.{setting}", "model.gated_linear_unit=false", "model.gated_linear_unit=true")
      for setting in ("glu_linear_offset=1.0", "activation_func_clamp_value=7.0")],
    ("model.num_query_groups=2", LATENT, "model.multi_latent_attention=false"),
    ("model.kv_channels=48", f"{LATENT} model.num_query_groups=null", "model.multi_latent_attention=false"),
    *[(f"model.{setting}", "", f"{HYBRID} model.mamba_num_groups=4")
      for setting in ("mamba_state_dim=16", "mamba_head_dim=32", "mamba_num_heads=16")],
    ("model.mamba_num_groups=4", "", HYBRID),
    ("model.mtp_loss_scaling_factor=0.3", "", "model.mtp_num_layers=1"),
    ("model.mtp_use_repeated_layer=true", "", "model.mtp_num_layers=1"),
    *[(f"model.{setting}", "", EXPERTS)
      for setting in ("moe_router_topk=3", "moe_router_pre_softmax=true", "moe_router_load_balancing_type=seq_aux_loss",
                      "moe_aux_loss_coeff=0.01", "moe_token_dispatcher_type=allgather",
                      "moe_shared_expert_intermediate_size=64", "moe_layer_freq=2",
                      "moe_router_group_topk=1", "moe_router_enable_expert_bias=true",
                      "moe_router_score_function=sigmoid", "moe_router_topk_scaling_factor=2.5",
                      "moe_router_dtype=fp32", "moe_z_loss_coeff=0.001", "expert_tensor_parallel_size=2")],
    ("model.moe_router_bias_update_rate=0.01", EXPERTS, "model.moe_router_enable_expert_bias=true"),
    ("model.moe_router_num_groups=2", EXPERTS, "model.moe_router_group_topk=1"),
    ("model.moe_router_pre_softmax=true", EXPERTS + " model.moe_router_score_function=sigmoid",
     "model.moe_router_score_function=softmax"),
    ("model.moe_router_topk_scaling_factor=2.5", EXPERTS + " model.moe_router_load_balancing_type=sinkhorn",
     "model.moe_router_load_balancing_type=none"),
    ("model.moe_shared_expert_gate=true", EXPERTS, "model.moe_shared_expert_intermediate_size=64"),
    ("model.max_seqlen_per_dp_cp_rank=512", "", PACKS),
    ("model.max_seqlen_per_dp_cp_rank=512", "model.context_parallel_size=2", "dist.eval_context_parallel_size=4"),
    ("model.min_dynamic_context_parallel_size=2", "", "model.dynamic_context_parallel=true"),
    ("model.min_dynamic_context_parallel_size=2", PACKS,
     "model.sequence_packing_scheduler=null model.dynamic_context_parallel=true"),
    ("model.dynamic_context_parallel_calibration_iters=3", "", "model.dynamic_context_parallel=true"),
    ("model.microbatch_group_size_per_vp_stage=4", "", "model.virtual_pipeline_model_parallel_size=2"),
    *[(f"model.overlap_p2p_comm={asked}", "", "model.virtual_pipeline_model_parallel_size=2")
      for asked in ("true", "false")],
    ("dist.dynamic_groups_at_start=true", "", PACKS),
    ("dist.dynamic_groups_at_start=true", "model.context_parallel_size=2", "dist.eval_context_parallel_size=4"),
    ("train.manual_gc_interval=10", "", "train.manual_gc=true"),
    ("validation.eval_global_batch_size=16", "validation.eval_iters=0", "validation.eval_iters=1"),
    ("validation.eval_micro_batch_size=2", "validation.eval_iters=0", "validation.eval_iters=1"),
    ("validation.eval_on_start=true", "validation.eval_iters=0", "validation.eval_iters=1"),
    ("validation.eval_iters=3", f"{PACKS} validation.full_validation=true", "validation.full_validation=false"),
    ("scheduler.lr_wsd_decay_iters=5", "", "scheduler.lr_decay_style=WSD"),
    ("scheduler.lr_wsd_decay_style=linear", "", "scheduler.lr_decay_style=WSD"),
    *[("optimizer.weight_decay=0.3", "scheduler.start_weight_decay=0.0 scheduler.end_weight_decay=0.0",
       f"scheduler.{name}=null") for name in ("start_weight_decay", "end_weight_decay")],
    ("optimizer.sgd_momentum=0.5", "", "optimizer.optimizer=sgd"),
    *[(f"optimizer.{setting}", "optimizer.optimizer=sgd", "optimizer.optimizer=adam")
      for setting in ("adam_beta1=0.8", "adam_beta2=0.9", "adam_eps=1e-6")],
    *[(f"profiling.{setting}", "", f"profiling.{switch}=true")
      for setting in ("profile_step_start=3", "profile_step_end=20", "profile_ranks=[1]")
      for switch in ("use_pytorch_profiler", "use_nsys_profiler")],
    ("profiling.profile_ranks=[1]", "", "profiling.nvtx_ranges=true"),
    *[(f"profiling.pytorch_profiler_collect_{what}=true", "", "profiling.use_pytorch_profiler=true")
      for what in ("shapes", "callstack")],
    ("dataset.mock_masked_fraction=0.5", "dataset.data_path=a", "dataset.data_path=null"),
    ("dataset.mock_num_samples=5", "dataset.data_path=a", "dataset.data_path=null"),
    ("dataset.mock_masked_fraction=0.5", f"{PACKS} dataset.data_path=a", "dataset.data_path=null"),
    *[("dataset.split='90,5,5'", f"dataset.data_path=a dataset.{name}_data_path=b validation.eval_iters={iters}",
       f"dataset.{name}_data_path=null") for name, iters in (("valid", 1), ("test", 0))],
    *[(f"dataset.{name}=question", "", f"{PACKS} dataset.kind=jsonl dataset.data_path=a.jsonl")
      for name in ("text_key", "prompt_key", "response_key")],
    *[("tokenizer.tokenizer_model=data/tokenizer", f"tokenizer.tokenizer_type={kind} {more}",
       "tokenizer.tokenizer_type=HuggingFaceTokenizer")
      for kind, more in (("ByteLevelTokenizer", ""), ("NullTokenizer", "tokenizer.vocab_size=512"))],
    ("dataset.mock_lengths=chat", "", PACKS),
    ("dataset.too_long=refuse", "", PACKS),
]  # fmt: skip


def findings(*overrides: str, environment: str = "cpu") -> list:
    """Return the findings of rule K19."""
    words = [word for text in overrides for word in text.split()]
    found = check(load_recipe(EXAMPLE_RECIPE, [*FLAT, *words]), 4, environment=environment)
    return [violation for violation in found if violation.rule == "K19"]


@pytest.mark.parametrize(("setting", "base", "switch"), UNUSED)
def test_unused_settings_warn(setting: str, base: str, switch: str) -> None:
    (found,) = findings(base, setting)
    assert (found.field, found.severity) == (setting.partition("=")[0], "warning")
    first = parse_fix(found.fix)[0]
    assert [setting_of(each) for each in first.overrides] == [found.field]
    assert findings(base, setting, *first.overrides) == []
    assert findings(base, setting, switch) == []
    assert any(word.partition("=")[0] in found.message for word in switch.split())
    assert failures_of(Example((*FLAT, *base.split(), setting))) == []


def test_derived_settings_do_not_count_as_given() -> None:
    """A run's own config.yaml has every value in it."""
    latent = (LATENT, "model.num_query_groups=8", "model.kv_channels=16", "model.num_attention_heads=8")
    assert findings(*latent, "model.hidden_size=128") == []


def test_a_setting_is_reported_once() -> None:
    found = findings("model.rope_scaling_factor=32.0", "model.position_embedding_type=none")
    assert [violation.fix for violation in found] == ["model.rope_scaling_factor=8.0"]
    (found,) = findings("model.rope_scaling_factor=32.0", LATENT, "model.num_query_groups=null")
    assert found.severity == "error"


@pytest.mark.parametrize("environment", ["cpu", "gpu"])
@pytest.mark.parametrize("recipe", list_recipes())
def test_no_recipe_has_unread_settings(recipe: str, environment: str) -> None:
    config = load_recipe(recipe)
    found = check(config, ranks_to_check(config, None), environment=environment)
    assert [violation for violation in found if violation.rule == "K19"] == []


@pytest.mark.parametrize(
    "choice",
    [
        f"{path.parent.name}={path.stem}"
        for path in sorted(CONFIGS.glob("*/*.yaml"))
        if path.parent.name not in ("pretrain", "sft")
    ],
)
def test_no_config_has_unread_settings(choice: str) -> None:
    for environment in ("cpu", "gpu"):
        found = check(load_recipe(EXAMPLE_RECIPE, [choice]), 4, environment=environment)
        assert [violation for violation in found if violation.rule == "K19"] == []


def test_sizes_of_experts_without_experts_are_ignored() -> None:
    """The experts' process groups are built for every model, so their grid must fit.

    Nothing else reads the sizes.
    """
    config = load_recipe(EXAMPLE_RECIPE, ["parallel=none", "model.expert_tensor_parallel_size=2"])
    found = {each.rule: each for each in check(config, 1, environment="cpu")}
    assert found.keys() == {"A3", "K19"} and found["A3"].field == found["K19"].field
    fix = parse_fix(found["A3"].fix)[0].overrides[0]
    assert fix == "model.expert_tensor_parallel_size=null"
    assert check(load_recipe(EXAMPLE_RECIPE, ["parallel=none", fix]), 1, environment="cpu") == []


@pytest.mark.parametrize("base", ["", LATENT], ids=["plain", "latent"])
def test_rules_ignore_unused_sizes(base: str) -> None:
    """Only the experts' tensor parallel size counts in every model.

    Its process groups are built for every model.
    """
    config = load_recipe(EXAMPLE_RECIPE, [*FLAT, *base.split()])
    unused_settings = {name for name, facts in settings().items() if not all(when.holds(config) for when in facts.when)}
    sizes = [field for field in sorted(unused_settings) if int in alternatives(kind_of(RunConfig, field))]
    assert len(sizes) > 10
    for field in set(sizes) - {"model.expert_tensor_parallel_size"}:
        for value in (3, 7, 33):
            found = check(with_overrides(config, [f"{field}={value}"]), 4, environment="cpu")
            assert {each.severity for each in found if each.field == field} <= {"warning"}, (field, value, found)
