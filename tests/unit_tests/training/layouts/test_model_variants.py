"""Model features under context parallelism train like one rank.

They are in float32, with a few iterations and an uneven loss mask.
"""

import functools
import json
from typing import Any

import pytest
import torch

from megatron_cp.models.layers.router import expert_biases
from megatron_cp.training.step import train_step
from megatron_cp.verify.reduce import ADAM_EPS
from tests.ranks import run_ranks
from tests.training_runs import Losses, start, tiny_config, train_losses, worst_difference
from tests.unit_tests.training.layouts.cases import CP2, CP4, HCP, MIXED, PP2, SP, TP2, VPP2, batch_for, layers_for

STEPS = 3  # the warm-up begins with a rate of zero: the third step is the first with other weights
Overrides = dict[str, Any]
MOE = {
    "model__num_moe_experts": 4,
    "model__moe_ffn_hidden_size": 48,
    "model__moe_router_load_balancing_type": "none",
    "model__moe_aux_loss_coeff": 0.0,
}
# As recipes have it, in buckets that are many even in a tiny model.
OVERLAPPED = {"ddp__overlap_grad_reduce": True, "ddp__overlap_param_gather": True, "ddp__bucket_size": 20000}
EP2 = {"model__expert_model_parallel_size": 2}
ETP1 = {"model__expert_tensor_parallel_size": 1}
SHARED = MOE | {"model__moe_shared_expert_intermediate_size": 32, "model__moe_shared_expert_gate": True}
GROUPED = MOE | {
    "model__num_moe_experts": 8,
    "model__moe_router_topk": 4,
    "model__moe_router_num_groups": 4,
    "model__moe_router_group_topk": 2,
}
LATENT_EXPERTS = SHARED | {"model__moe_latent_size": 24}
# DeepSeek's first layers are dense; a pipeline stage may have no experts, or none but experts.
MIXED_LAYERS = SHARED | {"model__moe_layer_freq": [0, 0, 1, 1]}
FIRST_STAGE = {"model__num_layers_in_first_pipeline_stage": 1}
EVERY_OTHER = MOE | {"model__moe_layer_freq": 2}
# A z-loss at which it is a fifth of the gradient.
SIGMOID = MOE | {
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_topk_scaling_factor": 2.5,
    "model__moe_router_dtype": "fp64",
    "model__moe_z_loss_coeff": 0.1,
}
# A rate at which the choice changes from step to step.
BIASED = SIGMOID | {"model__moe_router_enable_expert_bias": True, "model__moe_router_bias_update_rate": 0.1}
GPT_OSS = MOE | {
    "model__softmax_type": "learnable",
    "model__window_size": [8, 0],
    "model__window_attn_skip_freq": 2,
    "model__add_bias_linear": True,
    "model__activation_func": "quick_gelu",
    "model__glu_linear_offset": 1.0,
    "model__activation_func_clamp_value": 0.05,
}
MLA = {
    "model__multi_latent_attention": True,
    "model__qk_layernorm": True,
    "model__q_lora_rank": 16,
    "model__kv_lora_rank": 16,
    "model__qk_head_dim": 8,
    "model__qk_pos_emb_head_dim": 8,
    "model__v_head_dim": 8,
    "model__num_query_groups": 8,
}
CLASSIC = {
    "model__normalization": "LayerNorm",
    "model__activation_func": "gelu",
    "model__gated_linear_unit": False,
    "model__add_bias_linear": True,
    "model__add_qkv_bias": True,
    "model__position_embedding_type": "learned_absolute",
}
YARN = {
    "model__position_embedding_type": "yarn",
    "model__yarn_rotary_scaling_factor": 16.0,
    "model__yarn_original_max_position_embeddings": 8,
}
SHARPER = {"model__yarn_mscale": 0.7, "model__yarn_mscale_all_dim": 1.0}
HEAD_GROUPS = {"model__attention_head_groups": 2}
FULL = {"model__recompute_granularity": "full", "model__recompute_method": "uniform", "model__recompute_num_layers": 1}

# A weight at which the balance is a tenth of the gradient.
BALANCED = MOE | {"model__moe_router_load_balancing_type": "aux_loss", "model__moe_aux_loss_coeff": 1.0}
BY_SEQUENCE = BALANCED | {"model__moe_router_load_balancing_type": "seq_aux_loss"}
# Adam magnifies what rounding leaves of a gradient near zero: here to 3e-6, against 1e-7 with this eps.
OVER_THE_BATCH = BALANCED | {
    "model__moe_router_load_balancing_type": "global_aux_loss",
    "optimizer__adam_eps": ADAM_EPS,
}

LLAMA_3 = {"model__rope_scaling": True, "model__rotary_base": 500000.0}
SQUARED_RELU = {"model__activation_func": "squared_relu", "model__gated_linear_unit": False}
MHA = {"model__num_query_groups": 8}
WINDOW = {"model__window_size": [8, 0]}

CASES: dict[str, tuple[Overrides, int, Overrides]] = {
    "mha, sliding window, llama 3 rope scaling, squared relu, hcp": (
        MHA | WINDOW | LLAMA_3 | SQUARED_RELU,
        4,
        CP4 | HCP,
    ),
    "tied embeddings, pp2 cp2": ({"model__share_embeddings_and_output_weights": True}, 4, PP2 | CP2),
    "tied embeddings, tp2 cp2": ({"model__share_embeddings_and_output_weights": True}, 4, TP2 | CP2),
    "classic GPT, tp2 sp cp2": (CLASSIC, 4, TP2 | SP | CP2),
    "groups of heads, sinks and windows, a layer each": (GPT_OSS, 4, CP4 | MIXED | HEAD_GROUPS),
    "groups of heads, qk layernorm, recomputed, tp2 sp cp2": (
        {"model__qk_layernorm": True},
        4,
        TP2 | SP | CP2 | FULL | HEAD_GROUPS,
    ),
    "groups of heads, classic GPT, tp2 sp cp2": (CLASSIC, 4, TP2 | SP | CP2 | HEAD_GROUPS),
    "groups of heads, multi-token prediction, pp2 cp2": ({"model__mtp_num_layers": 2}, 4, PP2 | CP2 | HEAD_GROUPS),
    "groups of heads, yarn, hcp, decentralized": (
        YARN,
        4,
        CP4 | HCP | HEAD_GROUPS | {"dist__use_decentralized_pg": True},
    ),
    "groups of heads, overlapped reductions, dp2 cp2": ({}, 4, CP2 | OVERLAPPED | HEAD_GROUPS),
    "classic GPT, pp2 cp2": (CLASSIC, 4, PP2 | CP2),
    "qk layernorm, tp2 sp cp2": ({"model__qk_layernorm": True}, 4, TP2 | SP | CP2),
    "mha, hcp": (MHA, 4, CP4 | HCP),
    "mqa, p2p": ({"model__num_query_groups": 1}, 4, CP4),
    "bidirectional, hcp": ({"model__attention_mask_type": "no_mask"}, 4, CP4 | HCP),
    "sliding window, hcp": (WINDOW, 4, CP4 | HCP),
    "learnable softmax offset, p2p": ({"model__softmax_type": "learnable"}, 4, TP2 | CP2),
    "llama 3 rope scaling, hcp": (LLAMA_3, 4, CP4 | HCP),
    "yarn, hcp": (YARN, 4, CP4 | HCP),
    "yarn, hcp, decentralized": (YARN, 4, CP4 | HCP | {"dist__use_decentralized_pg": True}),
    "yarn, tp2 cp2": (YARN, 4, TP2 | CP2),
    "yarn and multi-token prediction, pp2 cp2": (YARN | {"model__mtp_num_layers": 1}, 4, PP2 | CP2),
    "squared relu, hcp": (SQUARED_RELU, 4, CP4 | HCP),
    "quick gelu, tp2 cp2": ({"model__activation_func": "quick_gelu"}, 4, TP2 | CP2),
    "squared relu of experts, cp2": (MOE | {"model__activation_func": "squared_relu"}, 2, CP2),
    "gpt-oss, p2p": (GPT_OSS, 4, CP4),
    "gpt-oss, hcp": (GPT_OSS, 4, CP4 | HCP),
    "gpt-oss, tp2 sp cp2 ep2": (GPT_OSS, 4, TP2 | SP | CP2 | EP2 | ETP1),
    "latent attention, hcp": (MLA, 4, CP4 | HCP),
    "latent attention with yarn, hcp": (MLA | YARN | SHARPER, 4, CP4 | HCP),
    "latent attention, tp2 cp2": (MLA, 4, TP2 | CP2),
    "experts in fewer dimensions, tp2 sp ep2 of whole experts, decentralized": (
        LATENT_EXPERTS,
        4,
        TP2 | SP | CP2 | EP2 | ETP1 | {"dist__use_decentralized_pg": True},
    ),
    "experts in fewer dimensions, recomputed, pp2 ep2": (
        LATENT_EXPERTS,
        4,
        PP2 | EP2 | {"model__recompute_granularity": "selective", "model__recompute_modules": ["moe"]},
    ),
    "latent attention with plain queries, tp2 sp cp2, decentralized": (
        MLA | {"model__q_lora_rank": None},
        4,
        TP2 | SP | CP2 | {"dist__use_decentralized_pg": True},
    ),
    "latent attention with yarn, tp2 sp": (MLA | YARN, 2, TP2 | SP),
    "latent attention with yarn and multi-token prediction, pp2 cp2": (
        MLA | YARN | {"model__mtp_num_layers": 1, "model__q_lora_rank": None},
        4,
        PP2 | CP2,
    ),
    "mixture of experts, cp2": (MOE, 2, CP2),
    "mixture of experts, ep2 cp2": (MOE, 4, CP2 | EP2),
    "one expert a token, cp2": (MOE | {"model__moe_router_topk": 1, "model__moe_router_pre_softmax": True}, 2, CP2),
    "balanced experts, cp2": (BALANCED, 2, CP2),
    "balanced experts, tp2 sp": (BALANCED, 2, TP2 | SP),
    "balanced experts, pp2": (BALANCED, 2, PP2),
    "balanced experts, dp2": (BALANCED, 2, {}),
    "balanced experts, ep2 cp2": (BALANCED, 4, CP2 | EP2),
    "balanced experts, tp2 sp cp2": (BALANCED, 4, TP2 | SP | CP2),
    "balanced experts, full recomputation, cp2": (BALANCED, 2, CP2 | FULL),
    "shared experts, hcp": (SHARED, 4, CP4 | HCP),
    "shared experts, ep2 cp2": (SHARED, 4, CP2 | EP2),
    "shared experts, tp2 sp, whole experts": (SHARED, 2, TP2 | SP | ETP1),
    "shared experts, latent attention, pp2 vpp2": (SHARED | MLA, 2, PP2 | VPP2),
    "sigmoid router with a z-loss, hcp": (SIGMOID, 4, CP4 | HCP),
    "sigmoid router with a z-loss, ep2 cp2": (SIGMOID, 4, CP2 | EP2),
    "sigmoid router with a z-loss, tp2 sp, whole experts": (SIGMOID, 2, TP2 | SP | ETP1),
    "sigmoid router with a z-loss, larger microbatches, pp2": (SIGMOID, 2, PP2 | {"train__micro_batch_size": 2}),
    "sigmoid router with a z-loss, full recomputation, dp2": (SIGMOID, 2, FULL),
    "experts in the last layers, hcp": (MIXED_LAYERS, 4, CP4 | HCP),
    "experts in the last layers, pp2 ep2 cp2": (MIXED_LAYERS, 4, PP2 | CP2 | EP2),
    "experts in the last layers, tp2 sp, whole experts": (MIXED_LAYERS, 2, TP2 | SP | ETP1),
    "experts in every other layer, pp2 vpp2": (EVERY_OTHER, 2, PP2 | VPP2),
    "experts in the last layers, pp2 of 1 and 3 layers, ep2": (MIXED_LAYERS, 4, PP2 | EP2 | FIRST_STAGE),
    "experts in every other layer, latent attention, ep2 cp2": (EVERY_OTHER | MLA, 4, CP2 | EP2),
    "balanced by a bias, hcp": (BIASED, 4, CP4 | HCP),
    "balanced by a bias, ep2 cp2": (BIASED, 4, CP2 | EP2),
    "balanced by a bias, tp2 sp, whole experts": (BIASED, 2, TP2 | SP | ETP1),
    "balanced by a bias, full recomputation, pp2 vpp2": (BIASED | MIXED_LAYERS, 2, PP2 | VPP2 | FULL),
    "experts of two groups of four, ep2 cp2": (GROUPED, 4, CP2 | EP2),
    "experts balanced in each sequence, cp2": (BY_SEQUENCE | {"train__micro_batch_size": 2}, 2, CP2),
    "experts balanced in each sequence, tp2 sp": (BY_SEQUENCE | {"train__micro_batch_size": 2}, 2, TP2 | SP),
    "experts balanced in each sequence, dp2": (BY_SEQUENCE, 2, {}),
    "experts balanced over the batch, cp2": (OVER_THE_BATCH, 2, CP2),
    "experts balanced over the batch, tp2 sp": (OVER_THE_BATCH, 2, TP2 | SP),
    "experts balanced over the batch, pp2": (OVER_THE_BATCH, 2, PP2),
    "full recomputation, cp2": ({}, 2, CP2 | FULL),
    "selective recomputation, hcp": ({}, 4, CP4 | HCP | {"model__recompute_granularity": "selective"}),
    "overlapped reductions, dp2 cp2": ({}, 4, CP2 | OVERLAPPED),
    # On a CPU, only learned positions are initialized with a different seed on each rank.
    "replicas' own seeds, dp2 cp2": (CLASSIC, 4, CP2 | {"rng__data_parallel_random_init": True}),
    "plain optimizer, dp2 cp2": ({}, 4, CP2 | {"optimizer__use_distributed_optimizer": False}),
    "larger microbatches, pp2 cp2": ({}, 4, PP2 | CP2 | {"train__micro_batch_size": 2}),
    "other rank order, pp2 dp2": ({}, 4, PP2 | {"dist__use_tp_pp_dp_mapping": True}),
    "other rank order, cp2 dp2": ({}, 4, CP2 | {"dist__use_tp_pp_dp_mapping": True}),
    "sgd, pp2 vpp2 cp2": (
        {"optimizer__optimizer": "sgd", "optimizer__use_distributed_optimizer": False},
        4,
        PP2 | VPP2 | CP2,
    ),
}
# Other layouts of models in the fast part, or parts of its models (of gemma 3, in test_gemma3.py).
SLOW = (
    "gpt-oss, p2p",
    "qk layernorm, tp2 sp cp2",
    "groups of heads, qk layernorm, recomputed, tp2 sp cp2",
    "groups of heads, classic GPT, tp2 sp cp2",
    "groups of heads, multi-token prediction, pp2 cp2",
    "groups of heads, yarn, hcp, decentralized",
    "groups of heads, overlapped reductions, dp2 cp2",
    "mha, hcp",
    "sliding window, hcp",
    "llama 3 rope scaling, hcp",
    "squared relu, hcp",
    "shared experts, ep2 cp2",
    "sigmoid router with a z-loss, ep2 cp2",
    "tied embeddings, tp2 cp2",
    "latent attention, tp2 cp2",
    "latent attention with yarn, hcp",
    "mixture of experts, ep2 cp2",
    "balanced experts, cp2",
    "classic GPT, pp2 cp2",
    "mqa, p2p",
    "mixture of experts, cp2",
    "yarn, tp2 cp2",
    "yarn, hcp, decentralized",
    "latent attention with yarn and multi-token prediction, pp2 cp2",
    "yarn and multi-token prediction, pp2 cp2",
    "quick gelu, tp2 cp2",
    "squared relu of experts, cp2",
    "balanced experts, tp2 sp",
    "balanced experts, pp2",
    "balanced experts, dp2",
    "balanced experts, ep2 cp2",
    "balanced experts, full recomputation, cp2",
    "shared experts, hcp",
    "shared experts, tp2 sp, whole experts",
    "balanced by a bias, full recomputation, pp2 vpp2",
    "balanced by a bias, hcp",
    "balanced by a bias, tp2 sp, whole experts",
    "experts of two groups of four, ep2 cp2",
    "experts in the last layers, hcp",
    "experts in the last layers, pp2 of 1 and 3 layers, ep2",
    "experts in the last layers, tp2 sp, whole experts",
    "experts in every other layer, pp2 vpp2",
    "experts in every other layer, latent attention, ep2 cp2",
    "sigmoid router with a z-loss, hcp",
    "sigmoid router with a z-loss, larger microbatches, pp2",
    "sigmoid router with a z-loss, tp2 sp, whole experts",
    "sigmoid router with a z-loss, full recomputation, dp2",
    "shared experts, latent attention, pp2 vpp2",
    "experts balanced in each sequence, tp2 sp",
    "experts balanced in each sequence, dp2",
    "experts balanced over the batch, tp2 sp",
    "experts balanced over the batch, pp2",
    "larger microbatches, pp2 cp2",
    "other rank order, cp2 dp2",
    "plain optimizer, dp2 cp2",
)


@functools.cache
def single_rank(model: str) -> Losses:
    return run_ranks(train_losses, 1, json.loads(model), STEPS)[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_feature_trains_like_one_rank(name: str) -> None:
    model, world_size, layout = CASES[name]
    model = layers_for(model, layout) | batch_for(world_size, layout) | model
    parallel = run_ranks(train_losses, world_size, model | layout, STEPS)[0]
    worst = worst_difference(parallel, single_rank(json.dumps(model)))
    assert max(worst) < 2e-6, worst


def overlapping(overrides: dict[str, Any]) -> tuple[set[bool], int, list]:
    """Return whether anything is overlapped, the number of buckets, and the results."""
    run, batches = start(tiny_config(**overrides))
    results = [train_step(run, next(batches).microbatches) for _ in range(2)]
    configs = [chunk.ddp_config for chunk in run.model]
    overlapped = {flag for c in configs for flag in (c.overlap_grad_reduce, c.overlap_param_gather)}
    return overlapped, sum(len(chunk.bucket_groups) for chunk in run.model), results


@pytest.mark.parametrize(
    ("ranks", "overrides", "expected"),
    [(1, {}, False), (2, PP2 | VPP2, False), (2, TP2 | SP | MOE | ETP1, True), (2, {}, True)],
    ids=["one rank", "pp2 vpp2", "copies of experts alone", "dp2"],
)
def test_overlap_without_replicas_does_nothing(ranks: int, overrides: dict[str, Any], expected: bool) -> None:
    """Each collective of one rank would still be launched, in every bucket."""
    plain = run_ranks(overlapping, ranks, overrides)
    for (overlapped, buckets, results), (_, few, same) in zip(
        run_ranks(overlapping, ranks, overrides | OVERLAPPED), plain, strict=True
    ):
        assert overlapped == {expected} and (buckets > few) == expected and (expected or results == same)


def precisions() -> tuple[set, set, set]:
    """Return the dtypes of parameters, gradient sums and the optimizer's copies."""
    run, batches = start(tiny_config(mixed_precision__fp32=False, mixed_precision__bf16=True, **CP2))
    before = [p.detach().clone() for chunk in run.model for p in chunk.parameters()]
    train_step(run, next(batches).microbatches)  # the warm-up starts with a learning rate of zero
    result = train_step(run, next(batches).microbatches)
    parameters = [p for chunk in run.model for p in chunk.parameters()]
    assert result.grad_norm and any(not p.equal(old) for p, old in zip(parameters, before, strict=True))
    updated = [p for group in run.optimizer.param_groups for p in group["params"]]
    run.close()
    return {p.dtype for p in parameters}, {p.main_grad.dtype for p in parameters}, {p.dtype for p in updated}


def test_bf16_sums_gradients_and_updates_weights_in_float32() -> None:
    for parameters, gradients, updated in run_ranks(precisions, 2):
        assert parameters == {torch.bfloat16} and gradients == updated == {torch.float32}


def test_bf16_stays_close_to_float32() -> None:
    """Three steps in bf16 must stay within a few thousandths of float32's loss.

    bf16 has 8 bits of mantissa. This holds under any layout.
    """
    bf16 = {"mixed_precision__fp32": False, "mixed_precision__bf16": True}
    batch = layers_for() | {"train__micro_batch_size": 2}
    for world_size, layout in [(1, {}), (4, CP4 | HCP), (4, TP2 | SP | CP2)]:
        losses = run_ranks(train_losses, world_size, bf16 | batch | layout, STEPS)[0]
        worst_loss, _ = worst_difference(losses, single_rank(json.dumps(batch)))
        assert 1e-6 < worst_loss < 5e-3, worst_loss


def test_router_settings_take_effect() -> None:
    """The comparisons above would pass if these settings did nothing."""
    alone = run_ranks(train_losses, 1, MOE, 2)[0]
    for balanced in (BALANCED, BY_SEQUENCE, OVER_THE_BATCH):
        losses = [step[:2] for step in run_ranks(train_losses, 1, balanced, 2)[0]]
        assert worst_difference(losses, alone)[1] > 0.05
    anywhere = run_ranks(train_losses, 1, GROUPED | {"model__moe_router_group_topk": None}, 2)[0]
    _, norm = worst_difference(run_ranks(train_losses, 1, GROUPED, 2)[0], anywhere)
    assert norm > 0.01, norm
    biased, unbiased = (run_ranks(train_losses, 1, model, 3)[0] for model in (BIASED, SIGMOID))
    assert worst_difference(biased[2:], unbiased[2:])[1] > 0.01
    sigmoid = run_ranks(train_losses, 1, SIGMOID | {"model__moe_z_loss_coeff": None}, 2)[0]
    losses = [step[:2] for step in unbiased[:2]]
    assert worst_difference(losses, sigmoid)[1] > 0.05


def biases_before_and_after() -> list[torch.Tensor]:
    """Return a router's biases at the start, after a step, and after a skipped one."""
    run, batches = start(tiny_config(**BIASED))
    bias, found = expert_biases(run.model)[0], []
    for counts in (None, True, False):
        if counts is not None:
            microbatches = next(batches).microbatches
            for microbatch in microbatches:
                microbatch["loss_mask"] *= counts
            assert train_step(run, microbatches).skipped is not counts
        found.append(bias.clone())
    run.close()
    return found


def test_a_skipped_step_moves_no_bias() -> None:
    ((start_value, stepped, left_out),) = run_ranks(biases_before_and_after, 1)
    assert not stepped.equal(start_value) and left_out.equal(stepped)
