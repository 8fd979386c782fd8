"""Experts in ``config.json``: number, width, and the router's choice and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.base import Problems, Settings, is_positive

# Settings of experts in families without latent attention and shared experts.
PLAIN_EXPERTS: dict[str, Any] = dict(
    moe_shared_expert_intermediate_size=None,
    moe_router_score_function="softmax",
    moe_router_topk_scaling_factor=None,
    moe_layer_freq=1,
    moe_router_group_topk=None,
    moe_router_enable_expert_bias=False,
    moe_latent_size=None,
)


@dataclass(frozen=True)
class Experts(Settings):
    """Experts chosen by their own scores."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        chosen, most = model.moe_router_topk, f"must be at most the number of experts, {model.num_moe_experts}"
        problems.unless(chosen <= (model.num_moe_experts or 0), "num_experts_per_tok", chosen, most)

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        balancing = model.moe_router_load_balancing_type
        message = "must not be sinkhorn: experts are chosen by their own scores"
        problems.unless(balancing != "sinkhorn", NAME.model.moe_router_load_balancing_type, balancing, message)
        (width,) = (name for name, own in self.counts.items() if own == "moe_ffn_hidden_size")
        return super().write(model, problems) | {width: model.moe_ffn_hidden_size or model.ffn_hidden_size}


@dataclass(frozen=True)
class SoftmaxExperts(Experts):
    """Experts in every layer, weighted by softmax.

    normalizes: whether ``norm_topk_prob`` selects a softmax over the chosen experts or over all; if not, over the
        chosen experts.
    """

    normalizes: bool = False

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        model.moe_aux_loss_coeff = float(values.get("router_aux_loss_coef") or 0.0)
        normalized = not self.normalizes or bool(values.get("norm_topk_prob"))
        model.moe_router_pre_softmax = not normalized
        alone = model.moe_router_topk == 1 and normalized
        problems.unless(not alone, "num_experts_per_tok", 1, "must be above 1: a single weight would always be 1")
        step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers")
        problems.unless(step == 1, "decoder_sparse_step", step, "must be 1: experts in every layer")
        problems.unless(not dense, "mlp_only_layers", dense, "must be empty: experts in every layer")

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        values = super().write(model, problems) | {"router_aux_loss_coef": model.moe_aux_loss_coeff}
        if self.normalizes:
            values |= {"norm_topk_prob": not model.moe_router_pre_softmax, "decoder_sparse_step": 1}
        return values


@dataclass(frozen=True)
class GroupedExperts(Experts):
    """Experts beside shared experts, chosen within groups, with scaled weights.

    scores_of_a_group: how many of a group's best scores are summed to choose groups; equal to a token's experts in each
        group.
    """

    scores_of_a_group: int = 2

    def normalizes(self, model: ModelConfig) -> bool:
        """Return whether the chosen weights sum to one; one weight would be always 1."""
        return model.moe_router_score_function == "sigmoid" and model.moe_router_topk > 1

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        model.moe_router_dtype = "fp32"
        factor: Any = values.get("routed_scaling_factor")
        problems.unless(is_positive(factor), "routed_scaling_factor", factor, "must be a number above 0")
        model.moe_router_topk_scaling_factor = float(factor) if is_positive(factor) and factor != 1 else None
        normalized, needed = bool(values.get("norm_topk_prob")), self.normalizes(model)
        problems.unless(normalized == needed, "norm_topk_prob", normalized, f"must be {str(needed).lower()}")
        groups, chosen_groups = self.groups(values, problems)
        if groups == 1:
            return
        model.moe_router_num_groups, model.moe_router_group_topk = groups, chosen_groups
        scores, chosen = self.scores_of_a_group, model.moe_router_topk
        message = f"must choose {scores} of the {chosen} experts in each group"
        problems.unless(chosen // chosen_groups == scores, "topk_group", chosen_groups, message)

    def groups(self, values: Mapping[str, Any], problems: Problems) -> tuple[int, int]:
        """Return the number of groups, and how many of them hold a token's experts."""
        return values.get("n_group") or 1, values.get("topk_group") or 1

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        groups, chosen_groups = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
        fits = groups == 1 or model.moe_router_topk // chosen_groups == self.scores_of_a_group
        message = f"must choose {self.scores_of_a_group} of a token's experts in each group"
        problems.unless(fits, NAME.model.moe_router_group_topk, chosen_groups, message)
        return super().write(model, problems) | {
            "norm_topk_prob": self.normalizes(model),
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "n_group": groups,
            "topk_group": chosen_groups,
        }
