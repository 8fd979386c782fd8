"""Experts in ``config.json``: how many, how wide, and how a token's are chosen and weighted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.families.common.base import Problems, Settings, is_positive

# Settings of experts that a family without latent attention and shared experts lacks.
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
    """Experts that are chosen by their own scores."""

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        chosen, most = model.moe_router_topk, f"at most the {model.num_moe_experts} experts are needed"
        problems.unless(chosen <= (model.num_moe_experts or 0), "num_experts_per_tok", chosen, most)

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        balancing = model.moe_router_load_balancing_type
        message = "experts that are chosen by their own scores are needed"
        problems.unless(balancing != "sinkhorn", NAME.model.moe_router_load_balancing_type, balancing, message)
        (width,) = (name for name, own in self.counts.items() if own == "moe_ffn_hidden_size")
        return super().write(model, problems) | {width: model.moe_ffn_hidden_size or model.ffn_hidden_size}


@dataclass(frozen=True)
class SoftmaxExperts(Experts):
    """Experts in every layer, whose weights are a softmax over the chosen ones, or over all.

    normalizes: whether ``norm_topk_prob`` says which of the two; without it, it is over the chosen ones.
    """

    normalizes: bool = False

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        model.moe_aux_loss_coeff = float(values.get("router_aux_loss_coef") or 0.0)
        normalized = not self.normalizes or bool(values.get("norm_topk_prob"))
        model.moe_router_pre_softmax = not normalized
        alone = model.moe_router_topk == 1 and normalized
        problems.unless(not alone, "num_experts_per_tok", 1, "one expert whose weight is always 1 has no counterpart")
        step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers")
        problems.unless(step == 1, "decoder_sparse_step", step, "experts in every layer are needed")
        problems.unless(not dense, "mlp_only_layers", dense, "experts in every layer are needed")

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        values = super().write(model, problems) | {"router_aux_loss_coef": model.moe_aux_loss_coeff}
        if self.normalizes:
            values |= {"norm_topk_prob": not model.moe_router_pre_softmax, "decoder_sparse_step": 1}
        return values


@dataclass(frozen=True)
class GroupedExperts(Experts):
    """Experts beside shared ones, chosen within groups; their weights are scaled.

    scores_of_a_group: how many of a group's best scores are summed to choose the groups; here as many as a token has
        experts in each.
    """

    scores_of_a_group: int = 2

    def normalizes(self, model: ModelConfig) -> bool:
        """Whether the chosen experts' weights sum to one. Not of one expert: its weight would always be 1."""
        return model.moe_router_score_function == "sigmoid" and model.moe_router_topk > 1

    def read(self, values: Mapping[str, Any], model: ModelConfig, problems: Problems) -> None:
        super().read(values, model, problems)
        model.moe_router_dtype = "fp32"
        factor: Any = values.get("routed_scaling_factor")
        problems.unless(is_positive(factor), "routed_scaling_factor", factor, "a number above 0 is needed")
        model.moe_router_topk_scaling_factor = float(factor) if is_positive(factor) and factor != 1 else None
        normalized, needed = bool(values.get("norm_topk_prob")), self.normalizes(model)
        problems.unless(normalized == needed, "norm_topk_prob", normalized, f"{str(needed).lower()} is needed")
        groups, of_them = self.groups(values, problems)
        if groups == 1:
            return
        model.moe_router_num_groups, model.moe_router_group_topk = groups, of_them
        scores, chosen = self.scores_of_a_group, model.moe_router_topk
        message = f"{scores} of the {chosen} experts in each group are needed"
        problems.unless(chosen // of_them == scores, "topk_group", of_them, message)

    def groups(self, values: Mapping[str, Any], problems: Problems) -> tuple[int, int]:
        """Return how many groups there are, and how many of them hold a token's experts."""
        return values.get("n_group") or 1, values.get("topk_group") or 1

    def write(self, model: ModelConfig, problems: Problems) -> dict[str, Any]:
        groups, of_them = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
        fits = groups == 1 or model.moe_router_topk // of_them == self.scores_of_a_group
        message = f"{self.scores_of_a_group} of a token's experts in each group are needed"
        problems.unless(fits, NAME.model.moe_router_group_topk, of_them, message)
        return super().write(model, problems) | {
            "norm_topk_prob": self.normalizes(model),
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "n_group": groups,
            "topk_group": of_them,
        }
