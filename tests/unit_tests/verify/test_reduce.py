"""Reduced configurations: small, valid, and with the layout to verify."""

import time

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_cp.common.errors import ConfigError
from megatron_cp.config.recipes import list_recipes, load_recipe
from megatron_cp.config.single_rank import on_single_rank
from megatron_cp.rules import check
from megatron_cp.verify.reduce import AUX_LOSS, LEARNING_RATE, MTP_LOSS, PACKED_TOKENS, Z_LOSS, comparable
from tests.functional_tests.random_layouts import configurations
from tests.training_runs import tiny_config
from tests.unit_tests.models.hybrids import HYBRID

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


ONE_LEVEL = ("model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null")
NANO = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
LATENT = ("model.multi_latent_attention=true",)
FULL = ("model.recompute_granularity=full", "model.recompute_num_layers=4")


def errors(config, world_size, environment="cpu"):
    return [v for v in check(config, world_size, environment=environment) if v.severity == "error"]


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_reduces_to_a_valid_small_layout(name):
    config = load_recipe(name)
    m = config.model
    world_size = config.recipe_world_size or config.model.fewest_ranks
    (small,) = comparable([config], world_size, 3)
    assert not errors(small, world_size)
    assert not errors(on_single_rank(small), 1)
    assert [getattr(small.model, field) for field in KEPT] == [getattr(m, field) for field in KEPT]
    stages = m.pipeline_model_parallel_size * (m.virtual_pipeline_model_parallel_size or 1)
    windows = m.window_attn_skip_freq if isinstance(m.window_attn_skip_freq, int) else 0
    assert small.model.hidden_size == 64 and small.model.num_layers <= max(4, stages, windows)
    least = 8 * max(4, m.context_parallel_size) * m.tensor_model_parallel_size
    assert small.dataset.seq_length <= (least if m.sequence_packing_scheduler is None else PACKED_TOKENS)


def test_per_layer_settings_keep_all_layers():
    kinds = ["p2p", "a2a", "all_gather", "p2p"]
    overrides = [f"model.cp_comm_type=[{','.join(kinds)}]", "model.hierarchical_context_parallel_sizes=null"]
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", overrides)], 4, 3)
    assert small.model.num_layers == 4 and small.model.cp_comm_type == kinds


@pytest.mark.parametrize(
    ("experts", "stages", "kept"),
    [([0, 0, 0, 1, 1, 1], 1, [0, 1]), ([0, 0, 0, 1, 1, 1], 2, [0, 0, 0, 1, 1, 1]), ([0, 1, 0, 1], 1, [0, 1, 0, 1])],
)
def test_one_layer_of_each_kind_is_kept_if_experts_follow_dense_layers(experts, stages, kept):
    settings = [f"model.num_layers={len(experts)}", f"model.moe_layer_freq={experts}", "model.num_moe_experts=4"]
    settings += [f"model.pipeline_model_parallel_size={stages}"]
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", settings)], 8, 3)
    assert small.model.moe_layer_freq == kept and small.model.num_layers == len(kept) and not errors(small, 8)


def test_stages_of_unevenly_many_layers_keep_them():
    stages = [
        "model.num_layers=6",
        "model.pipeline_model_parallel_size=2",
        "model.num_layers_in_first_pipeline_stage=1",
    ]
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", stages)], 8, 3)
    assert (small.model.num_layers, small.model.num_layers_in_first_pipeline_stage) == (6, 1) and not errors(small, 8)
    assert not errors(on_single_rank(small), 1)


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
    assert not errors(small, 4) and not errors(on_single_rank(small), 1)
    model, length = small.model, small.dataset.seq_length
    assert small.dataset.kind == "mock_documents" and model.dynamic_context_parallel
    assert 2 * model.max_seqlen_per_dp_cp_rank < length <= 3 * model.max_seqlen_per_dp_cp_rank
    assert on_single_rank(small).model.max_seqlen_per_dp_cp_rank == length


def test_the_reference_has_no_fused_or_chunked_loss():
    overrides = ["model.cross_entropy_loss_fusion=true", "mixed_precision=bf16_mixed"]
    reference = on_single_rank(load_recipe("llama_tiny_pretrain_config", overrides))
    assert not reference.model.cross_entropy_loss_fusion


def test_two_layouts_get_one_model():
    first = load_recipe("llama_tiny_pretrain_config", ["model.context_parallel_size=3", "model.cp_comm_type=p2p",
                                                       "model.hierarchical_context_parallel_sizes=null"])  # fmt: skip
    second = load_recipe("llama_tiny_pretrain_config", ["model.tensor_model_parallel_size=2",
                                                        "model.sequence_parallel=true"])  # fmt: skip
    small = comparable([first, second], 24, 3)
    assert small[0].dataset.seq_length == small[1].dataset.seq_length == 48
    assert small[0].train.global_batch_size == small[1].train.global_batch_size
    assert on_single_rank(small[0]).model == on_single_rank(small[1]).model
    assert not errors(small[0], 24) and not errors(small[1], 24)


def test_other_models_cannot_be_compared():
    first = load_recipe("llama_tiny_pretrain_config")
    second = load_recipe("llama_tiny_pretrain_config", ["model.num_layers=2", "model.rotary_base=500000.0"])
    with pytest.raises(ConfigError, match=r"model\.num_layers: differs(.|\n)*model\.rotary_base: differs"):
        comparable([first, second], 4, 3)


def test_packs_are_compared_with_packs():
    packs = ["model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=24", "dataset.seq_length=72"]
    first, second = (load_recipe("llama_tiny_pretrain_config", more) for more in ([], packs))
    with pytest.raises(ConfigError, match="one layout packs samples and the other does not"):
        comparable([first, second], 4, 3)


def test_two_layouts_of_packs_have_no_balancing_loss_in_common():
    experts = ["model.num_moe_experts=4", "model.moe_ffn_hidden_size=32", "model.moe_aux_loss_coeff=0.01"]
    packs = ["model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=24", "dataset.seq_length=72"]
    for more, count, coefficient in (([], 1, AUX_LOSS), (packs, 1, AUX_LOSS), (packs, 2, 0.0), ([], 2, AUX_LOSS)):
        configs = [load_recipe("llama_tiny_pretrain_config", experts + more)] * count
        assert {small.model.moe_aux_loss_coeff for small in comparable(configs, 4, 3)} == {coefficient}


CHUNKED = ["model.cross_entropy_chunk_size=4096", "model.mlp_chunk_size=4096"]
WINDOW = ["model.window_size=[512,0]"]
PACKS = ["model.dynamic_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=2048", "dataset.seq_length=8192"]


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("layout", [[], ["model.tensor_model_parallel_size=4", "model.sequence_parallel=true"]])
@pytest.mark.parametrize("packs", [[], PACKS])
def test_thresholds_shrink_with_the_model(micro, layout, packs):
    """Otherwise a loss would be computed at once, and a window hide nothing."""
    batch = [f"train.micro_batch_size={1 if packs else micro}", "dataset.seq_length=4096"]
    settings = [*ONE_LEVEL, *batch, *CHUNKED, *WINDOW, *layout, *packs, "ddp.overlap_grad_reduce=true"]
    config = load_recipe("llama_tiny_pretrain_config", settings)
    (small,) = comparable([config], 16, 3)
    model, length = small.model, small.dataset.seq_length
    assert not errors(small, 16)
    parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
    tokens = model.max_seqlen_per_dp_cp_rank if packs else length // model.context_parallel_size
    positions = tokens // parts
    size = max(1, model.cross_entropy_chunk_size // (small.train.micro_batch_size * parts))
    assert 2 <= -(-positions // size) <= 4 and positions > size
    assert model.mlp_chunk_size == model.cross_entropy_chunk_size
    assert 1 <= model.window_size[0] <= (length // 32 if packs else length // 4)
    assert small.ddp.bucket_size < 64 * 256  # the embedding's gradient alone fills one
    (whole,) = comparable([config], 16, 3, full=True)
    assert whole.model.cross_entropy_chunk_size == 4096 and whole.model.window_size == [512, 0]


def test_auxiliary_losses_are_compared():
    small_weights = ["model.moe_aux_loss_coeff=0.001", "model.moe_z_loss_coeff=0.001", "model.mtp_num_layers=1"]
    small_weights += ["model.mtp_loss_scaling_factor=0.01", "model.num_moe_experts=4", "optimizer.lr=1e-5"]
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", [*small_weights, "optimizer.min_lr=1e-6"])], 4, 3)
    assert small.model.moe_aux_loss_coeff == AUX_LOSS and small.model.moe_z_loss_coeff == Z_LOSS
    assert small.model.mtp_loss_scaling_factor == MTP_LOSS
    assert small.optimizer.lr == LEARNING_RATE and small.optimizer.min_lr == pytest.approx(LEARNING_RATE / 10)


def test_reducing_the_largest_recipe_is_quick():
    config = load_recipe("llama31_405b_pretrain_config")
    seconds = []
    for _ in range(3):
        start = time.process_time()
        comparable([config], 1024, 3)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2


@pytest.mark.parametrize("full", [False, True], ids=["small", "full"])
@pytest.mark.parametrize(
    ("overrides", "environment"),
    [
        ((*FULL, "model.recompute_method=uniform"), "cpu"),
        ((*FULL, "model.recompute_method=block"), "cpu"),
        (("dataset.data_path=corpus", "dataset.eod_mask_loss=true"), "cpu"),
        (("model.cross_entropy_loss_fusion=true", "mixed_precision=bf16_mixed"), "cpu"),
        (("model.rotary_percent=0.6", "model.kv_channels=20"), "cpu"),
        (("model.attention_backend=te",), "gpu"),
        (("model.num_moe_experts=4", "model.moe_grouped_gemm=true"), "gpu"),
        (("model.num_moe_experts=4",), "gpu"),
        (("model.gradient_accumulation_fusion=true",), "gpu"),
        (("model.cross_entropy_loss_fusion=true",), "gpu"),
        (("model.cross_entropy_loss_fusion=true", "model.cross_entropy_fusion_impl=native"), "gpu"),
        (("model.recompute_granularity=selective", "model.recompute_modules=[layernorm]"), "gpu"),
        (("model.recompute_granularity=selective", "model.recompute_modules=[mlp,layernorm]"), "gpu"),
        ((*LATENT, "model.qk_layernorm=true"), "gpu"),
        (("model.sequence_packing_scheduler=dp_balanced", "dataset.kind=documents", "dataset.data_path=corpus",
          "dataset.mock_lengths=anything"), "cpu"),
    ],
    ids=str,
)  # fmt: skip
def test_valid_layouts_are_not_refused(overrides, environment, full):
    config = load_recipe("llama_tiny_pretrain_config", [*ONE_LEVEL, *overrides])
    assert not errors(config, 4, environment)
    (reduced,) = comparable([config], 4, 3, full=full)
    assert not errors(reduced, 4, environment) and not errors(on_single_rank(reduced), 1, environment)


def test_features_that_work_in_float32_are_kept():
    kernel = ["model.cross_entropy_loss_fusion=true", "model.cross_entropy_fusion_impl=te"]
    modules = ["model.recompute_granularity=selective", "model.recompute_modules=[mlp,layernorm]"]
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", [*ONE_LEVEL, *kernel, *modules])], 4, 3)
    assert small.model.cross_entropy_loss_fusion and small.model.cross_entropy_fusion_impl == "te"
    assert small.model.recompute_granularity == "selective" and small.model.recompute_modules == ["mlp"]


@pytest.mark.parametrize(("share", "rotated"), [(1.0, 16), (0.6, 8), (0.5, 8), (0.02, 2)])
def test_a_share_of_each_head_is_rotated_in_pairs(share, rotated):
    (small,) = comparable([load_recipe("llama_tiny_pretrain_config", [f"model.rotary_percent={share}"])], 4, 3)
    assert small.model.kv_channels * small.model.rotary_percent == rotated


def test_mock_lengths_that_have_no_room_are_the_usual_ones():
    packs = ["model.sequence_packing_scheduler=dp_balanced", "dataset.seq_length=8192"]
    for lengths, full, expected in [("long", False, "lognormal"), ("long", True, "long"), ("chat", False, "chat")]:
        config = load_recipe("llama_tiny_pretrain_config", [*packs, f"dataset.mock_lengths={lengths}"])
        (reduced,) = comparable([config], 4, 3, full=full)
        assert reduced.dataset.mock_lengths == expected


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_latent_attention_is_reduced_to_divisible_sizes(tp):
    heads = ["model.num_attention_heads=24", "model.kv_lora_rank=32", "model.q_lora_rank=48", "model.vocab_size=768"]
    config = load_recipe(
        "llama_tiny_pretrain_config",
        ["parallel=none", *LATENT, *heads, "model.hidden_size=192", f"model.tensor_model_parallel_size={tp}"],
    )
    (small,) = comparable([config], tp, 3)
    assert not errors(small, tp, "cpu")
    assert small.model.kv_lora_rank <= 24 * tp and small.model.q_lora_rank <= 16 * tp


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "-M*"),
        (["model.pipeline_model_parallel_size=2"], "M-M*"),
        (["model.pipeline_model_parallel_size=7", "model.mtp_num_layers=1", f"model.hybrid_layer_pattern={NANO}/*-"],
         "-M-M-M*/*-"),
        (["model.mtp_num_layers=2", f"model.hybrid_layer_pattern={NANO}/E*/E*", "model.num_moe_experts=4"],
         "-M*/E*/E*"),
        ([f"model.hybrid_layer_pattern={NANO[:28]}|{NANO[28:]}", "model.pipeline_model_parallel_size=2"],
         f"{NANO[:28]}|{NANO[28:]}"),
    ],
)  # fmt: skip
def test_a_hybrid_keeps_the_first_few_layers_that_have_all_its_kinds(overrides, expected):
    name = "nemotron_nano_9b_v2_128k_dynamic_cp_pretrain_config"
    layout = ["model.tensor_model_parallel_size=1", "model.context_parallel_size=1", "model.sequence_parallel=false"]
    config = load_recipe(name, [*layout, *overrides])
    assert not errors(config, 14, "cpu")
    (small,) = comparable([config], 14, 3)
    assert small.model.hybrid_layer_pattern == expected and not errors(small, 14, "cpu")


# In addition to random layouts: settings that need a certain precision, device, size or kind of data.
PIECES = [
    {"mixed_precision__fp32": False, "mixed_precision__bf16": True},
    {"mixed_precision__fp32": False, "mixed_precision__fp16": True, "ddp__check_for_nan_in_grad": False},
    {"model__attention_backend": "te"},
    {"model__attention_backend": "native"},
    {"model__recompute_granularity": "full", "model__recompute_method": "block", "model__recompute_num_layers": 2},
    {"model__recompute_granularity": "full", "model__recompute_method": "uniform", "model__recompute_num_layers": 4},
    {"model__recompute_granularity": "selective", "model__recompute_modules": ["layernorm"]},
    {"model__recompute_granularity": "selective", "model__recompute_modules": ["core_attn", "layernorm"]},
    {"model__num_layers": 8},
    {"model__num_layers": 12, "model__window_size": [16, 0], "model__window_attn_skip_freq": 3},
    {"model__cp_comm_type": "auto", "model__hierarchical_context_parallel_sizes": None},
    {"model__cp_comm_type": "p2p", "model__hierarchical_context_parallel_sizes": None},
    {"model__apply_rope_fusion": True},
    {"model__gradient_accumulation_fusion": True},
    {"model__cross_entropy_loss_fusion": True},
    {"model__cross_entropy_loss_fusion": True, "model__cross_entropy_fusion_impl": "te"},
    {"model__cross_entropy_loss_fusion": True, "model__cross_entropy_fusion_impl": "native"},
    {"model__moe_grouped_gemm": True},
    {"model__num_moe_experts": 4, "model__moe_shared_expert_intermediate_size": 512},
    {"model__num_moe_experts": 4, "model__num_layers": 8, "model__moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1]},
    {"model__num_moe_experts": 4, "model__num_layers": 8, "model__moe_layer_freq": 3},
    {"model__num_moe_experts": 4, "model__moe_layer_freq": 1} | HYBRID | {"model__hybrid_layer_pattern": "ME*E"},
    {"model__num_moe_experts": 4, "model__expert_model_parallel_size": 2}
    | HYBRID
    | {"model__num_layers": 6, "model__hybrid_layer_pattern": "M*-E|EE"},
    {"model__qk_layernorm": True, "model__q_lora_rank": None},
    {"model__rotary_percent": 0.6, "model__kv_channels": 20},
    {"model__rotary_percent": 0.3, "model__qk_pos_emb_head_dim": 16},
    {"model__attention_dropout": 0.1},
    {"model__deterministic_mode": True, "env_vars": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}},
    {"dataset__kind": "indexed", "dataset__data_path": "corpus", "dataset__eod_mask_loss": True},
    {"dataset__kind": "indexed", "dataset__data_path": "corpus", "dataset__reset_position_ids": True},
    {"dataset__kind": "documents", "dataset__data_path": "corpus", "dataset__mock_lengths": "anything"},
    {"dataset__kind": "jsonl", "dataset__data_path": "corpus.jsonl"},
    {"dataset__mock_lengths": "long", "dataset__seq_length": 8192, "model__max_seqlen_per_dp_cp_rank": 8192},
    {"scheduler__lr_decay_style": "WSD", "scheduler__lr_wsd_decay_iters": 5},
    {"scheduler__lr_warmup_fraction": 0.2, "scheduler__lr_warmup_iters": 0},
    {"validation__eval_iters": 2, "dist__eval_context_parallel_size": 2},
    {"profiling__use_pytorch_profiler": True},
    {"checkpoint__save_interval": 10, "checkpoint__save_retain_interval": 20},
]


DRAWN = given(
    configurations(), st.lists(st.sampled_from(PIECES), max_size=4), st.sampled_from(["cpu", "gpu"]), st.booleans()
)
SETTINGS = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@DRAWN
@settings(SETTINGS, max_examples=40)
def test_accepted_layouts_are_accepted_reduced(drawn, pieces, environment, full):
    accepted_reduced(drawn, pieces, environment, full)


@pytest.mark.slow
@DRAWN
@settings(SETTINGS, max_examples=200)
def test_two_hundred_accepted_layouts_are_accepted_reduced(drawn, pieces, environment, full):
    accepted_reduced(drawn, pieces, environment, full)


def accepted_reduced(drawn, pieces, environment, full):
    world_size, overrides = drawn
    for piece in pieces:
        overrides = overrides | piece
    variables = overrides.pop("env_vars", {})
    config = tiny_config(**overrides)
    config.env_vars = variables
    latent_and_split = config.model.multi_latent_attention and config.model.tensor_model_parallel_size > 1
    assume(not latent_and_split and not errors(config, world_size, environment))
    (reduced,) = comparable([config], world_size, 3, full=full)
    assert not errors(reduced, world_size, environment)
    assert not errors(on_single_rank(reduced), 1, environment)


def test_the_reference_holds_the_longest_sample_with_its_padding():
    """One token of padding makes an odd length even."""
    config = load_recipe("llama_tiny_dynamic_cp_pretrain_config", [*ONE_LEVEL, "dataset.seq_length=65"])
    assert on_single_rank(config).model.max_seqlen_per_dp_cp_rank == 66
