"""Rules on mixtures of experts: completeness, routing, balancing, gloo's limits."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.transports.registry import RING
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import closest, divisors, ones, resized


@rule(
    "K15",
    "The settings of a mixture of experts are complete.",
    f"The router chooses {NAME.model.moe_router_topk} of {NAME.model.num_moe_experts} experts. With tp > 1 "
    "megatron-core requires sequence parallelism.",
    broken(model=dict(num_moe_experts=2, moe_router_topk=4)),
)
def experts_are_complete(c: Context) -> Iterator[Finding]:
    model = c.model
    if model.num_moe_experts is None:
        if model.moe_ffn_hidden_size is not None:
            yield Finding(
                NAME.model.moe_ffn_hidden_size, "moe_ffn_hidden_size is set but num_moe_experts is None", "=null"
            )
        if "E" in model.layer_letters:
            message = f"must be set: each E in {NAME.model.hybrid_layer_pattern} is a layer with experts"
            yield Finding(NAME.model.num_moe_experts, message, "=8", _pattern(model, "E", "-", -1))
    if model.num_moe_experts is None or model.num_moe_experts < 1:
        return  # rule A1 reports sizes below 1
    yield from _expert_layers(model)
    experts, topk = model.num_moe_experts, model.moe_router_topk
    if not 1 <= topk <= experts:
        message = f"must be between 1 and {NAME.model.num_moe_experts} ({experts}), got {topk}"
        yield Finding(NAME.model.moe_router_topk, message, f"={max(1, min(experts, topk))}")
    yield from _expert_groups(model)
    sinkhorn = model.moe_router_load_balancing_type == "sinkhorn"
    softmax = model.moe_router_score_function == "softmax" and not sinkhorn
    if topk == 1 and softmax and not model.moe_router_pre_softmax:
        yield Finding(
            NAME.model.moe_router_pre_softmax,
            f"with {NAME.model.moe_router_topk}=1 a softmax over the chosen expert is always 1, and the router does "
            "not learn",
            "=true",
        )
    if model.moe_router_enable_expert_bias and (sinkhorn or softmax):
        yield Finding(
            NAME.model.moe_router_enable_expert_bias,
            "Expert bias for aux-loss-free routing only supports 'sigmoid' and 'sqrtsoftplus' scores, and no sinkhorn",
            "=false",
        )
    if sinkhorn and model.moe_aux_loss_coeff:
        yield Finding(NAME.model.moe_aux_loss_coeff, "Sinkhorn routing does not support aux loss.", "=0.0")
    if c.tp > 1 and not model.sequence_parallel:
        yield Finding(
            NAME.model.sequence_parallel,
            "performance may degrade if MoE and tensor parallelism are enabled without also enabling sequence "
            "parallelism: an error in megatron-core",
            "=true",
        )
    yield from _expert_biases(model)
    if model.moe_grouped_gemm and not c.te_layers:
        yield Finding(NAME.model.moe_grouped_gemm, "grouped matrix products need Transformer Engine", "=null")


def _expert_biases(model: ModelConfig) -> Iterator[Finding]:
    field = NAME.model.add_bias_linear
    if not model.add_bias_linear:
        return
    if model.expert_tensor_parallel_size != 1:
        message = "Bias in Moe is only supported when ETP==1"
        yield Finding(NAME.model.expert_tensor_parallel_size, message, "=1", f"{field}=false")
    if model.moe_shared_expert_intermediate_size is not None:
        yield Finding(field, "bias is not supported in the shared experts", "=false")
    if model.moe_latent_size is not None:
        message = f"bias is not supported in experts with {NAME.model.moe_latent_size}"
        yield Finding(field, message, "=false")


def _expert_groups(model: ModelConfig) -> Iterator[Finding]:
    field, experts = NAME.model.moe_router_group_topk, model.num_moe_experts or 0
    groups, chosen, topk = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if chosen is None or chosen < 1 or (groups is not None and groups < 1):
        return  # not set, or rule A1 reports it
    if groups is None:
        message = "When using group limited routing, moe_router_num_groups must be specified."
        yield Finding(field, message, "=null", f"{NAME.model.moe_router_num_groups}={experts}")
    elif experts % groups:
        yield Finding(
            NAME.model.moe_router_num_groups,
            f"num_moe_experts ({experts}) should be divisible by moe_router_num_groups ({groups})",
            values=closest(divisors(experts), groups),
        )
    elif not chosen <= min(groups, topk):
        message = f"must be at most {min(groups, topk)}, for {groups} groups and {topk} experts per token"
        yield Finding(field, message, f"={min(groups, topk)}")
    elif topk > chosen * (experts // groups):
        # megatron-core chooses experts of other groups, or fails.
        available = f"{chosen} groups have {chosen * (experts // groups)} experts"
        message = f"{available}, fewer than {NAME.model.moe_router_topk} ({topk})"
        yield Finding(field, message, f"={-(-topk * groups // experts)}")


def _pattern(model: ModelConfig, old: str, new: str, times: int) -> str:
    """Return the hybrid pattern with letters replaced; empty without ``old``."""
    pattern = model.hybrid_layer_pattern or ""
    return f'"{NAME.model.hybrid_layer_pattern}={pattern.replace(old, new, times)}"' if old in pattern else ""


def _expert_layers(model: ModelConfig) -> Iterator[Finding]:
    field, every = NAME.model.moe_layer_freq, model.moe_layer_freq
    if model.architecture == "hybrid":
        if "E" not in model.layer_letters:
            experts = NAME.model.num_moe_experts
            message = f"has no layer with experts (E), but {experts} is {model.num_moe_experts}"
            yield Finding(NAME.model.hybrid_layer_pattern, message, f"{experts}=null", _pattern(model, "-", "E", 1))
    elif isinstance(every, int):
        if every < 1:
            message = f"every n-th layer has experts: n must be at least 1, got {every}"
            yield Finding(field, message, "=1 (experts in all layers)")
    elif len(every) != model.num_layers:
        yield Finding(
            field,
            f"has {len(every)} entries for {model.num_layers} layers",
            values=[resized(every, model.num_layers) if every else 1, 1],
        )
    elif not set(every) <= {0, 1}:
        message = f"entries must be 1 (layer with experts) or 0 (without), got {every}"
        yield Finding(field, message, values=[ones(every)])
    elif not any(every):
        yield Finding(field, "leaves no layer with experts", "=1", f"{NAME.model.num_moe_experts}=null")


@rule(
    "K22",
    "No sinkhorn routing under context or sequence parallelism.",
    "Sinkhorn balances experts over the tokens of one rank. A sliced sequence is therefore silently routed in "
    "another way, and the loss differs by about 0.01. Rule H18 (balancing over a pack) excludes sinkhorn for packs.",
    broken(model=dict(num_moe_experts=4, moe_router_load_balancing_type="sinkhorn", moe_router_topk=1)),
)
def sinkhorn_sees_whole_sequences(c: Context) -> Iterator[Finding]:
    sliced = c.cp > 1 or (c.tp > 1 and c.model.sequence_parallel)
    if c.model.num_moe_experts and c.model.moe_router_load_balancing_type == "sinkhorn" and sliced:
        yield Finding(
            NAME.model.moe_router_load_balancing_type,
            "sinkhorn balances experts over one rank's slice of the sequence, which changes the routing",
            values=["aux_loss", "none"],
        )


@rule(
    "K33",
    "global_aux_loss needs a single data-parallel replica.",
    "megatron-core divides each replica's share of global_aux_loss by the tokens of all replicas (Megatron-LM issue "
    "3672), then averages the shares. With N replicas the loss is silently N times too weak. A constant factor "
    "cannot correct this: each replica averages over its own microbatches so far. Rule H18 (balancing over a pack) "
    "excludes it for packs.",
    broken(
        *RING.settings,
        model=dict(
            context_parallel_size=2,
            num_moe_experts=4,
            moe_router_load_balancing_type="global_aux_loss",
            moe_aux_loss_coeff=1.0,
        ),
        train=dict(micro_batch_size=8),
    ),
)
def one_replica_balances_the_global_batch(c: Context) -> Iterator[Finding]:
    is_global = c.model.moe_router_load_balancing_type == "global_aux_loss" and c.model.moe_aux_loss_coeff > 0
    if c.divisible and c.dp > 1 and c.model.num_moe_experts and is_global and not c.packed:
        yield Finding(
            NAME.model.moe_router_load_balancing_type,
            f"with {c.dp} data-parallel replicas global_aux_loss is {c.dp} times too weak",
            values=["aux_loss", "seq_aux_loss"],
        )


@rule(
    "K29",
    "With gloo, experts are split by tensor parallelism or spread by expert parallelism, not both.",
    "Ranks that split an expert gather the tokens of other ranks, in unequal numbers. gloo gathers equal numbers "
    "only. The allgather dispatcher is not affected: it gathers all tokens before it chooses.",
    broken(
        *RING.settings,
        model=dict(
            context_parallel_size=1,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            num_moe_experts=4,
            expert_model_parallel_size=2,
        ),
        train=dict(micro_batch_size=8),
    ),
)
def experts_over_gloo(c: Context) -> Iterator[Finding]:
    # Ranks of one tensor-parallel group hold equal numbers of tokens; ranks of several groups do not in packs.
    unequal = c.ep > 1 or (c.runs_packs and c.etp > c.tp)
    if c.gloo and c.etp > 1 and unequal and c.model.moe_token_dispatcher_type == "alltoall":
        yield Finding(
            NAME.model.expert_tensor_parallel_size,
            f"etp {c.etp} with ep {c.ep} and tp {c.tp} gathers unequal numbers of tokens, which gloo does not support",
            "=1",
        )
