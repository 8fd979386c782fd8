"""Random small configurations: mostly valid ones, some with a small mistake."""

from typing import Any

from hypothesis import strategies as st

from megatron_cp.verify.reduce import ADAM_EPS

Overrides = dict[str, Any]
SIZES = [
    (tp, cp, pp, dp)
    for tp in (1, 2, 4)
    for cp in (1, 2, 3, 4)
    for pp in (1, 2, 4)
    for dp in (1, 2)
    if tp * cp * pp * dp <= 4
]
# The subject is more than one rank per sample.
SIZES = [sizes for sizes in SIZES if sizes[1] > 1] * 3 + [sizes for sizes in SIZES if sizes[1] == 1]
TRANSPORTS = ("p2p", "all_gather", "a2a", "a2a+p2p")
NO_SAVINGS: Overrides = {
    "model__recompute_granularity": None,
    "model__recompute_method": None,
    "model__recompute_num_layers": None,
    "model__cross_entropy_chunk_size": None,
    "model__mlp_chunk_size": None,
    "model__attention_head_groups": 1,
    "model__overlap_head_groups": False,
    "model__offload_layer_inputs": False,
}


@st.composite
def configurations(draw: Any) -> tuple[int, Overrides]:
    """Yield (world size, overrides of the tests' tiny configuration)."""
    tp, cp, pp, dp = draw(st.sampled_from(SIZES))
    vpp = draw(st.sampled_from([None, None, 2])) if pp > 1 else None
    per_stage = draw(st.sampled_from([1, 2]))
    # A stage may have these in place of a layer: there may be fewer layers than stages, and a stage without layers.
    counted = draw(st.sampled_from([(), (), ("loss",), ("embedding",), ("embedding", "loss")])) if pp > 1 else ()
    layers = max(1, pp * (vpp or 1) * per_stage - len(counted)) + draw(st.sampled_from([0, 0, 0, 0, 0, 1]))
    kv_heads = tp * draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    sequence_parallel = draw(st.booleans()) if tp > 1 else False
    unit = 2 * cp * (tp if sequence_parallel else 1)
    # Gradients of few tokens are mostly rounding, which Adam turns into full steps.
    length = unit * (12 // unit + draw(st.integers(1, 3))) + draw(st.sampled_from([0] * 15 + [1]))
    micro = draw(st.sampled_from([1, 1, 2]))
    rounds = pp * draw(st.sampled_from([1, 2])) if vpp else draw(st.integers(1, 3))
    values: Overrides = {
        "model__tensor_model_parallel_size": tp,
        "model__context_parallel_size": cp,
        "model__pipeline_model_parallel_size": pp,
        "model__virtual_pipeline_model_parallel_size": vpp,
        "model__sequence_parallel": sequence_parallel,
        "model__num_layers": layers,
        "model__num_attention_heads": heads,
        "model__num_query_groups": kv_heads,
        "model__hidden_size": draw(st.sampled_from([32, 48])),
        "model__ffn_hidden_size": 24 * tp,
        "model__kv_channels": draw(st.sampled_from([8, 16, 8, 16, 6, 5])),
        "dataset__seq_length": length,
        "train__micro_batch_size": micro,
        "train__global_batch_size": micro * dp * rounds,
        "dist__use_decentralized_pg": draw(st.booleans()),
        "dist__use_tp_pp_dp_mapping": draw(st.sampled_from([False, False, True])),
        "optimizer__use_distributed_optimizer": draw(st.booleans()),
        "optimizer__adam_eps": ADAM_EPS,
    }
    values |= {f"model__account_for_{what}_in_pipeline_split": True for what in counted}
    values |= draw(_transports(cp, layers))
    for feature in draw(st.lists(st.sampled_from(FEATURES), max_size=3)):
        values |= feature(draw, values)
    return tp * cp * pp * dp, values


@st.composite
def _transports(draw: Any, cp: int, layers: int) -> Overrides:
    if draw(st.booleans()):
        kinds = [draw(st.sampled_from(TRANSPORTS)) for _ in range(layers)]
    else:
        kinds = draw(st.sampled_from(TRANSPORTS))
    levels = None
    if "a2a+p2p" in kinds:
        a2a = draw(st.sampled_from([size for size in range(1, cp + 1) if cp % size == 0]))
        levels = [a2a, cp // a2a]
    return {"model__cp_comm_type": kinds, "model__hierarchical_context_parallel_sizes": levels}


def _experts(draw: Any, values: Overrides) -> Overrides:
    hybrid = "model__hybrid_layer_pattern" in values
    return {
        "model__num_moe_experts": 4,
        "model__moe_ffn_hidden_size": 16 * values["model__tensor_model_parallel_size"],
        "model__moe_router_load_balancing_type": "none",
        "model__moe_token_dispatcher_type": draw(st.sampled_from(["alltoall", "allgather"])),
        "model__moe_latent_size": draw(st.sampled_from([None, None, 24])),
        "model__expert_model_parallel_size": draw(st.sampled_from([1, 2])),
        "model__moe_layer_freq": 1 if hybrid else draw(st.sampled_from([1, 2])),
        "model__moe_shared_expert_intermediate_size": draw(
            st.sampled_from([None, 16 * values["model__tensor_model_parallel_size"]])
        ),
    }


def _latent(draw: Any, values: Overrides) -> Overrides:
    heads = values["model__num_attention_heads"]
    dims: Overrides = {"kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
    dims["q_lora_rank"] = draw(st.sampled_from([16, None]))
    latent: Overrides = {"model__multi_latent_attention": True, "model__num_query_groups": heads}
    latent["model__qk_layernorm"] = draw(st.booleans())
    if draw(st.booleans()):
        latent["model__position_embedding_type"] = "yarn"
        latent |= {"model__yarn_rotary_scaling_factor": 4.0, "model__yarn_original_max_position_embeddings": 32}
    return latent | {f"model__{name}": size for name, size in dims.items()}


def _classic(draw: Any, values: Overrides) -> Overrides:
    return {
        "model__normalization": "LayerNorm",
        "model__activation_func": "gelu",
        "model__gated_linear_unit": False,
        "model__add_bias_linear": True,
        "model__position_embedding_type": "learned_absolute",
    }


def _packed(draw: Any, values: Overrides) -> Overrides:
    """Return packed samples of many lengths.

    Dynamic groups, or the configured group for all.
    """
    dynamic = draw(st.booleans())
    return {
        "model__dynamic_context_parallel": dynamic,
        "model__sequence_packing_scheduler": "default_dynamic_cp" if dynamic else "dp_balanced",
        "model__dynamic_context_parallel_calibration_iters": 0,
        "model__packed_placement": draw(st.sampled_from(["zigzag", "balanced"])),
        "model__max_seqlen_per_dp_cp_rank": 8 * draw(st.integers(6, 16)),
        "dataset__kind": "mock_documents",
        "dataset__seq_length": 96,
        "dataset__random_seed": draw(st.integers(0, 99)),
        "train__micro_batch_size": 1,
        "train__global_batch_size": 12,
    }


def _mtp(draw: Any, values: Overrides) -> Overrides:
    depths = draw(st.sampled_from([1, 2]))
    mtp: Overrides = {"model__mtp_num_layers": depths, "model__mtp_loss_scaling_factor": 0.5}
    mtp["model__mtp_use_repeated_layer"] = draw(st.booleans())
    return mtp | _ahead(draw, values.get("model__hybrid_layer_pattern"), depths)


def _ahead(draw: Any, pattern: str | None, depths: int | None) -> Overrides:
    """Return the layers of a hybrid model's prediction depths."""
    if not pattern or not depths:
        return {}
    own = "".join(draw(st.sampled_from("M*-")) for _ in range(draw(st.integers(1, 2))))
    return {"model__hybrid_layer_pattern": pattern.split("/")[0] + f"/{own}" * depths}


def _hybrid(draw: Any, values: Overrides) -> Overrides:
    groups = values["model__tensor_model_parallel_size"] * draw(st.sampled_from([1, 2]))
    letters = "MM*-EE" if "model__num_moe_experts" in values else "MM*-"
    pattern = "".join(draw(st.sampled_from(letters)) for _ in range(values["model__num_layers"]))
    return {
        "model__architecture": "hybrid",
        "model__hybrid_layer_pattern": pattern,
        **_ahead(draw, pattern, values.get("model__mtp_num_layers")),
        "model__moe_layer_freq": 1,
        "model__mamba_num_groups": groups,
        "model__mamba_num_heads": groups * draw(st.sampled_from([2, 3, 4])),
        "model__mamba_head_dim": 8,
        "model__mamba_state_dim": 8,
    }


@st.composite
def saving_configurations(draw: Any) -> tuple[int, Overrides]:
    """Yield configurations with all that saves memory of long sequences at once."""
    world_size, values = draw(configurations())
    heads_per_rank = values["model__num_query_groups"] // values["model__tensor_model_parallel_size"]
    return world_size, values | {
        "model__recompute_granularity": "full",
        "model__recompute_method": draw(st.sampled_from(["uniform", "block"])),
        "model__recompute_num_layers": 1,
        "model__cross_entropy_chunk_size": draw(st.sampled_from([5, 16])),
        "model__mlp_chunk_size": draw(st.sampled_from([7, 16])),
        "model__attention_head_groups": draw(st.sampled_from([heads_per_rank, 2 * heads_per_rank, 1])),
        "model__overlap_head_groups": draw(st.booleans()),
        "model__offload_layer_inputs": draw(st.sampled_from([True, True, False])),
    }


def _window(draw: Any, values: Overrides) -> Overrides:
    return {"model__window_size": [draw(st.integers(0, 9)), 0]}


def _overlap(draw: Any, values: Overrides) -> Overrides:
    return {
        "optimizer__use_distributed_optimizer": True,
        "ddp__overlap_grad_reduce": True,
        "ddp__overlap_param_gather": draw(st.booleans()),
        "ddp__bucket_size": draw(st.sampled_from([None, 5000])),
    }


def _fixed(**values: Any) -> Any:
    return lambda draw, others: values


FEATURES = [
    _packed,
    _packed,
    _mtp,
    _hybrid,
    _experts,
    _latent,
    _classic,
    _window,
    _overlap,
    _fixed(model__attention_mask_type="no_mask"),
    _fixed(model__softmax_type="learnable"),
    _fixed(model__softmax_type="off-by-one"),
    _fixed(model__share_embeddings_and_output_weights=True),
    _fixed(model__qk_layernorm=True),
    _fixed(model__add_qkv_bias=True),
    _fixed(model__rotary_percent=0.5),
    _fixed(model__rotary_interleaved=True),
    _fixed(model__position_embedding_type="none"),
    _fixed(
        model__position_embedding_type="yarn",
        model__yarn_rotary_scaling_factor=16.0,
        model__yarn_original_max_position_embeddings=8,
    ),
    _fixed(model__recompute_granularity="selective"),
    _fixed(model__cross_entropy_chunk_size=7),
    _fixed(model__mlp_chunk_size=7),
    _fixed(model__recompute_granularity="full", model__recompute_method="uniform", model__recompute_num_layers=1),
    _fixed(dist__use_decentralized_pg=True, dist__use_tp_pp_dp_mapping=True),
    _fixed(optimizer__optimizer="sgd", optimizer__use_distributed_optimizer=False),
]
