"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import FUNCTION, LAYOUT, WEIGHTS, When, equals, given, setting, size

EXPERTS = given("model.num_moe_experts", 8)
EVERY = When(  # a hybrid model's is an error already
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
    num_moe_experts: int | None = size(None, "experts of a layer; null: MLPs instead", WEIGHTS)
    moe_layer_freq: int | list[int] = setting(
        1,
        "one layer of n has experts, from the first on, or a list of 0 and 1, one a layer",
        WEIGHTS,
        when=EVERY,
        translated=True,
    )
    moe_router_topk: int = setting(2, "experts that a token is sent to", FUNCTION, when=EXPERTS, translated=True)
    moe_router_num_groups: int | None = size(
        None,
        "groups of experts; a token's lie in moe_router_group_topk of them",
        FUNCTION,
        when=(EXPERTS, given("model.moe_router_group_topk", 1), NO_SINKHORN),
    )
    moe_router_group_topk: int | None = size(
        None, "groups that a token's experts lie in", FUNCTION, when=(EXPERTS, NO_SINKHORN)
    )
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = setting(
        "softmax", "what makes scores of the router's logits", FUNCTION, when=(EXPERTS, NO_SINKHORN)
    )
    moe_router_pre_softmax: bool = setting(
        False,
        "softmax over all experts, before the choice; one expert a token has no other",
        FUNCTION,
        when=(EXPERTS, SOFTMAX, NO_SINKHORN),
    )
    moe_router_topk_scaling_factor: float | None = setting(
        None,
        "the chosen experts' weights are multiplied with it",
        FUNCTION,
        least=1e-30,  # megatron-core takes 0 for none
        when=(EXPERTS, NO_SINKHORN),
    )
    moe_router_enable_expert_bias: bool = setting(
        False,
        "a bias per expert balances the load without a loss; it changes only which experts are chosen",
        WEIGHTS,
        when=EXPERTS,
    )
    moe_router_bias_update_rate: float = setting(
        1e-3,
        "how fast that bias follows the load",
        least=0,
        when=equals("model.moe_router_enable_expert_bias", True),
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(
        None, "of scores and weighted sums; null: the model's", when=EXPERTS
    )
    moe_apply_probs_on_input: bool = setting(
        False, "a token is weighted before its expert, not after; with one expert a token", FUNCTION, when=EXPERTS
    )
    moe_ffn_hidden_size: int | None = size(None, "width of an expert; null: ffn_hidden_size", WEIGHTS)
    moe_latent_size: int | None = size(
        None, "dimensions that experts work in, where they are not the model's", WEIGHTS, when=EXPERTS
    )
    moe_shared_expert_intermediate_size: int | None = size(
        None, "width of all shared experts together; null: none", WEIGHTS, when=EXPERTS
    )
    moe_shared_expert_gate: bool = setting(
        False,
        "the shared experts' sum is multiplied with a gate",
        WEIGHTS,
        when=given("model.moe_shared_expert_intermediate_size", 1024),
    )
    moe_aux_loss_coeff: float = setting(0.0, "weight of the balancing loss", least=0, when=EXPERTS)
    moe_z_loss_coeff: float | None = setting(
        None, "weight of the loss that keeps the router's logits small", least=0, when=EXPERTS, translated=True
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = (
        setting(
            "aux_loss", "what balances the experts: over a microbatch, a sequence, all batches so far", when=EXPERTS
        )
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = setting(
        "alltoall", "how tokens reach experts of other ranks", when=EXPERTS
    )
    moe_grouped_gemm: bool | None = setting(
        None,
        "one product for a rank's experts; null: in Transformer Engine's layers",
        LAYOUT,
        when=EXPERTS,
        translated=True,
    )
