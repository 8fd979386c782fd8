"""Mixture of experts"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import FUNCTION, LAYOUT, WEIGHTS, When, equals, given, setting, size

EXPERTS = given("model.num_moe_experts", 8)
EVERY = When(  # in a hybrid model another rule reports it
    "model.num_moe_experts",
    lambda run: run.model.num_moe_experts is not None or run.model.architecture == "hybrid",
    "model.num_moe_experts=8",
)
NO_SINKHORN = When(
    "model.moe_router_load_balancing_type=aux_loss or none",
    lambda run: run.model.moe_router_load_balancing_type != "sinkhorn",
    "model.moe_router_load_balancing_type=none",
)
SOFTMAX = equals("model.moe_router_score_function", "softmax")


@dataclass
class Experts:
    num_moe_experts: int | None = size(None, "experts per layer; null: MLPs instead", WEIGHTS)
    moe_layer_freq: int | list[int] = setting(
        1,
        "one layer in n has experts, starting with the first, or a list of 0 and 1, one per layer",
        WEIGHTS,
        when=EVERY,
        translated=True,
    )
    moe_router_topk: int = setting(2, "experts per token", FUNCTION, when=EXPERTS, translated=True)
    moe_router_num_groups: int | None = size(
        None,
        "groups of experts; each token uses moe_router_group_topk of them",
        FUNCTION,
        when=(EXPERTS, given("model.moe_router_group_topk", 1), NO_SINKHORN),
    )
    moe_router_group_topk: int | None = size(None, "groups of experts per token", FUNCTION, when=(EXPERTS, NO_SINKHORN))
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = setting(
        "softmax", "function from router logits to scores", FUNCTION, when=(EXPERTS, NO_SINKHORN)
    )
    moe_router_pre_softmax: bool = setting(
        False,
        "softmax over all experts before the choice; required for one expert per token",
        FUNCTION,
        when=(EXPERTS, SOFTMAX, NO_SINKHORN),
    )
    moe_router_topk_scaling_factor: float | None = setting(
        None,
        "factor on the weights of the chosen experts",
        FUNCTION,
        least=1e-30,  # megatron-core takes 0 for none
        when=(EXPERTS, NO_SINKHORN),
    )
    moe_router_enable_expert_bias: bool = setting(
        False,
        "balance the load by a bias per expert, without a loss; affects only which experts are chosen",
        WEIGHTS,
        when=EXPERTS,
    )
    moe_router_bias_update_rate: float = setting(
        1e-3,
        "update rate of the expert bias",
        least=0,
        when=equals("model.moe_router_enable_expert_bias", True),
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(
        None, "dtype of scores and weighted sums; null: the model's", when=EXPERTS
    )
    moe_apply_probs_on_input: bool = setting(
        False, "weight a token before its expert, not after; needs one expert per token", FUNCTION, when=EXPERTS
    )
    moe_ffn_hidden_size: int | None = size(None, "width of an expert; null: ffn_hidden_size", WEIGHTS)
    moe_latent_size: int | None = size(
        None, "input and output dimensions of experts; null: the model's width", WEIGHTS, when=EXPERTS
    )
    moe_shared_expert_intermediate_size: int | None = size(
        None, "total width of the shared experts; null: none", WEIGHTS, when=EXPERTS
    )
    moe_shared_expert_gate: bool = setting(
        False,
        "multiply the shared experts' sum by a gate",
        WEIGHTS,
        when=given("model.moe_shared_expert_intermediate_size", 1024),
    )
    moe_aux_loss_coeff: float = setting(0.0, "weight of the load-balancing loss", least=0, when=EXPERTS)
    moe_z_loss_coeff: float | None = setting(
        None, "weight of the z-loss, which keeps router logits small", least=0, when=EXPERTS, translated=True
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = (
        setting(
            "aux_loss",
            "balancing: per microbatch, per sequence, over all batches so far, sinkhorn, or none",
            when=EXPERTS,
        )
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = setting(
        "alltoall", "communication that sends tokens to experts on other ranks", when=EXPERTS
    )
    moe_grouped_gemm: bool | None = setting(
        None,
        "one grouped matrix product for all experts of a rank; null: with Transformer Engine's layers",
        LAYOUT,
        when=EXPERTS,
        translated=True,
    )
