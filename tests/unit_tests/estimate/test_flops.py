"""Floating-point operations against hand counts and weights of built models."""

from typing import Any

import numpy as np
import pytest

from megatron_cp.config.run_config import ModelConfig, RunConfig
from megatron_cp.estimate.flops import attended_pairs, training_flops
from megatron_cp.training.setup import setup
from tests.ranks import run_ranks
from tests.training_runs import VOCAB, tiny_config


def model(**settings: Any) -> ModelConfig:
    config = RunConfig()
    config.model = ModelConfig(**settings)
    return config.finalize().model


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (0, 2), (4, 1), (100, 100)])
@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_attended_pairs_are_those_of_the_mask(length: int, window: tuple[int, int], causal: bool) -> None:
    left, right = window
    expected = sum(
        (left < 0 or q - k <= left) and (right < 0 or k - q <= right) and not (causal and k > q)
        for q in range(length)
        for k in range(length)
    )
    assert attended_pairs(np.array([length, 1]), causal, window).tolist() == [expected, 1]


def test_a_dense_model_by_hand() -> None:
    """The formula must give what a count by hand gives.

    Two layers, hidden 8, 4 heads of 2 with 2 KV heads, gated MLP of 12, 16 tokens in the vocabulary, 5 tokens.
    """
    tiny = model(num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12)
    projections = 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8)  # queries, keys, values, output
    mlp = 2 * 3 * 8 * 12
    scores_and_values = 2 * (2 * 2 * 4) * 0.5  # two products of 2 channels by 4 heads; the half is the causal mask's
    causal_pairs_twice = 5 * 6
    expected = 3 * (2 * 5 * (projections + mlp) + 2 * scores_and_values * causal_pairs_twice + 5 * 2 * 8 * 16)
    assert training_flops(tiny, 16, [5]) == expected


def test_documents_of_a_pack_do_not_attend_to_each_other() -> None:
    tiny = model(num_layers=1, hidden_size=8, num_attention_heads=2)
    together, apart = training_flops(tiny, 16, [12]), training_flops(tiny, 16, [4, 8])
    assert apart == training_flops(tiny, 16, [4]) + training_flops(tiny, 16, [8])
    # 12 tokens see 78 keys; 4 and 8 tokens see 10 + 36.
    assert together - apart == 3 * (78 - 46) * 2 * (4 + 4) * 2


def test_the_operations_of_the_largest_models_are_counted_exactly() -> None:
    """The counts do not fit 64 bits."""
    large = model(num_layers=126, hidden_size=16384, num_attention_heads=128, num_query_groups=8)
    one = training_flops(large, 128256, [2**22])
    assert one > 2**64 and training_flops(large, 128256, [2**22] * 1024) == 1024 * one


@pytest.mark.parametrize(("every", "windowed"), [(None, 4), (2, 2), (4, 3), ([0, 1, 0, 0], 1)])
def test_each_layer_has_its_own_window(every: Any, windowed: int) -> None:
    shape: dict[str, Any] = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    whole = training_flops(model(**shape), 16, [10])
    some = training_flops(model(**shape, window_size=[3, 0], window_attn_skip_freq=every), 16, [10])
    pairs = 55 - (1 + 2 + 3 + 7 * 4)
    assert whole - some == 3 * windowed * pairs * 2 * (4 + 4) * 2


MODELS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "plain MLP": {"model__gated_linear_unit": False},
    "tied embeddings": {"model__share_embeddings_and_output_weights": True},
    "latent attention": {
        "model__multi_latent_attention": True,
        "model__q_lora_rank": 24,
        "model__qk_head_dim": 16,
        "model__qk_pos_emb_head_dim": 8,
        "model__v_head_dim": 12,
    },
    "experts": {"model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__moe_ffn_hidden_size": 48},
    "experts in every other layer": {
        "model__num_moe_experts": 4,
        "model__moe_layer_freq": 2,
        "model__moe_ffn_hidden_size": 48,
    },
    "shared experts": {"model__num_moe_experts": 4, "model__moe_shared_expert_intermediate_size": 40},
    "experts in fewer dimensions": {
        "model__num_moe_experts": 4,
        "model__moe_latent_size": 24,
        "model__moe_shared_expert_intermediate_size": 40,
    },
    "gated shared experts": {
        "model__num_moe_experts": 4,
        "model__moe_shared_expert_intermediate_size": 40,
        "model__moe_shared_expert_gate": True,
    },
}


def matrix_elements(overrides: dict[str, Any]) -> float:
    """Count elements of every weight matrix that one token uses.

    Experts count by the share of them that a token uses.
    """
    config = tiny_config(**overrides)
    run = setup(config, VOCAB)
    total = 0.0
    for name, weight in run.model[0].named_parameters():
        if weight.dim() < 2 or ("word_embeddings" in name and not config.model.share_embeddings_and_output_weights):
            continue
        share = config.model.moe_router_topk / (config.model.num_moe_experts or 1) if ".experts." in name else 1.0
        total += share * weight.numel()
    run.close()
    return total


@pytest.mark.parametrize("name", MODELS)
def test_each_token_meets_each_weight_once_forward_and_twice_backward(name: str) -> None:
    built = tiny_config(**MODELS[name]).model
    (elements,) = run_ranks(matrix_elements, 1, MODELS[name])
    dims = (16 + 8) + 12 if built.multi_latent_attention else 2 * 8
    attention = built.num_layers * built.num_attention_heads * 2 * dims  # the one pair of one token
    assert training_flops(built, 256, [1]) == 3 * (2 * elements + attention)


def test_a_hybrids_halves_are_a_layer() -> None:
    shape: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12}
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 6, "moe_shared_expert_intermediate_size": 10}
    for settings, whole, halves in (({}, 1, "*-"), (experts, 1, "*|E"), (experts | {"moe_layer_freq": 2}, 2, "*E*-")):
        gpt = model(**shape, **settings, num_layers=whole)
        pattern = {"architecture": "hybrid", "hybrid_layer_pattern": halves, "moe_layer_freq": 1}
        hybrid = model(**shape, **settings | pattern, num_layers=2 * whole)
        assert training_flops(hybrid, 16, [5, 9]) == training_flops(gpt, 16, [5, 9])
        gpt.mtp_num_layers = hybrid.mtp_num_layers = 2
        hybrid.hybrid_layer_pattern += f"/{halves[-2:].replace('|', '*')}" * 2
        assert training_flops(hybrid, 16, [5, 9]) == training_flops(gpt, 16, [5, 9])


def test_multi_token_prediction_and_mamba_by_hand() -> None:
    shape: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12}
    one, two = (training_flops(model(**shape, num_layers=n), 16, [5]) for n in (1, 2))
    ahead = training_flops(model(**shape, num_layers=1, mtp_num_layers=1), 16, [5])
    assert ahead - one == (two - one) + 3 * 5 * 2 * (
        16 * 8 + 2 * 8 * 8
    )  # a layer, an output product, joining two states

    mamba = {"mamba_state_dim": 4, "mamba_head_dim": 4, "mamba_num_groups": 1}
    window = {"window_size": [1, 0], "window_attn_skip_freq": 2, "num_layers": 1}  # in odd layers
    by_two, by_one = (
        training_flops(model(**shape, **window, mtp_num_layers=2, mtp_use_repeated_layer=one), 16, [5])
        for one in (False, True)
    )
    assert by_two - by_one == 3 * (15 - 9) * 4 * 8  # the second depth sees five tokens' past, or the last two

    pure = model(**shape, **mamba, num_layers=1, architecture="hybrid", hybrid_layer_pattern="M")
    # 16 inner channels in 4 heads; z, x, B, C and dt enter; a convolution of width 4 over x, B and C.
    weights = 8 * (16 + 16 + 4 + 4 + 4) + 16 * 8 + 4 * (16 + 4 + 4)
    assert training_flops(pure, 16, [5]) == 3 * 5 * (2 * weights + 5 * 16 * 4 + 2 * 8 * 16)
