"""H rules: process groups and dynamic context parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.transports.registry import RING
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.checks.parallel.context_parallel import TWO_GROUPS
from megatron_cp.rules.checks.run.recomputation import WHOLE_LAYERS
from megatron_cp.rules.proposals import NATIVE, closest, divisors

_DYNAMIC = (f"{NAME.model.dynamic_context_parallel}=true", f"{NAME.model.max_seqlen_per_dp_cp_rank}=64")


@rule(
    "H6",
    "Evaluation's context parallel size divides the dp * cp ranks.",
    "Upstream's setting changes batch sizes only; the model still uses training's groups. Here evaluation runs its "
    "samples as packs on groups of that size.",
    broken(dist=dict(eval_context_parallel_size=3), validation=dict(eval_iters=1)),
)
def evaluation_groups(c: Context) -> Iterator[Finding]:
    size, ranks = c.config.dist.eval_context_parallel_size, c.dp * c.cp
    if size is not None and c.divisible and (size < 1 or ranks % size):
        message = (
            f"must be an integer of at least 1, got {size}"
            if size < 1
            else f"world size ({c.world_size}) is not divisible by eval model parallel size ({c.tp * c.pp * size}): "
            f"{size} does not divide the dp * cp = {c.dp} * {c.cp} = {ranks} ranks"
        )
        yield Finding(
            NAME.dist.eval_context_parallel_size,
            message,
            "=null (training's groups)",
            values=closest(divisors(ranks), size)[:2],
        )


@rule(
    "H21",
    "Evaluation in separate groups counts positions from the start of each sample.",
    "Evaluation runs samples as packs, where positions do not restart within a sample.",
    broken(
        dist=dict(eval_context_parallel_size=1),
        dataset=dict(reset_position_ids=True),
        model=dict(position_embedding_type="learned_absolute"),
    ),
)
def evaluation_positions(c: Context) -> Iterator[Finding]:
    if c.config.dist.eval_context_parallel_size is not None and c.config.dataset.reset_position_ids:
        yield Finding(
            NAME.dataset.reset_position_ids,
            f"has no effect on evaluation with {NAME.dist.eval_context_parallel_size}, but would change training",
            "=false",
            f"{NAME.dist.eval_context_parallel_size}=null",
        )


@rule(
    "H8",
    "The smallest dynamic context-parallel group has at most dp * cp ranks.",
    "Upstream builds groups of powers of two only and does not check the limits.",
    broken(*_DYNAMIC, model=dict(min_dynamic_context_parallel_size=8)),
)
def dynamic_sizes(c: Context) -> Iterator[Finding]:
    smallest, ranks = c.model.min_dynamic_context_parallel_size, c.dp * c.cp
    if c.divisible and c.model.dynamic_context_parallel and smallest > ranks:
        yield Finding(
            NAME.model.min_dynamic_context_parallel_size,
            f"must be at most dp * cp = {c.dp} * {c.cp} = {ranks} ranks",
            f"={ranks}",
        )


@rule(
    "H10",
    "Packed microbatches with Transformer Engine use a one-level transport.",
    "A microbatch uses one process group, but hierarchical attention in Transformer Engine needs one per level. The "
    "native attention builds both levels for each microbatch.",
    broken(*_DYNAMIC, model=dict(attention_backend="te"), environment="gpu"),
)
def dynamic_transport(c: Context) -> Iterator[Finding]:
    if c.backend == "te" and c.runs_packs and c.hierarchical:
        yield Finding(
            NAME.model.cp_comm_type,
            f"{c.hierarchical.name} requires {TWO_GROUPS}, but a microbatch has one group",
            RING.settings[0],
            NATIVE,
        )


@rule(
    "H14",
    "The longest sequence fits into all ranks together.",
    f"A sample is spread over at most dp * cp ranks, with {NAME.model.max_seqlen_per_dp_cp_rank} tokens each.",
    broken(model=dict(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=32)),
)
def longest_sequence_fits(c: Context) -> Iterator[Finding]:
    model, length = c.model, c.config.dataset.seq_length
    ranks = c.dp * c.cp if model.dynamic_context_parallel else c.cp
    unit = 2 * (c.tp if model.sequence_parallel else 1)
    needed = -(-length // (ranks * unit)) * unit  # a sample is padded to a multiple of this on every rank
    limit = model.max_seqlen_per_dp_cp_rank
    if c.divisible and c.packed and limit is not None and limit < needed:
        yield Finding(
            NAME.model.max_seqlen_per_dp_cp_rank,
            f"sequence length {length} needs {needed} tokens on each of {ranks} ranks",
            f"={needed}",
            f"{NAME.dataset.seq_length}={max(limit // unit, 1) * unit * ranks}" if limit >= unit else "",
        )


@rule(
    "H15",
    f"{NAME.model.dynamic_context_parallel} and the default_dynamic_cp scheduler need each other.",
    "The setting enables dynamic group sizes, and the scheduler chooses them; dp_balanced packs for a fixed size.",
    broken(model=dict(sequence_packing_scheduler="default_dynamic_cp")),
)
def scheduler_fits(c: Context) -> Iterator[Finding]:
    model = c.model
    if model.dynamic_context_parallel != (model.sequence_packing_scheduler == "default_dynamic_cp"):
        wanted = "default_dynamic_cp" if model.dynamic_context_parallel else "dp_balanced"
        yield Finding(
            NAME.model.sequence_packing_scheduler,
            f"does not fit {NAME.model.dynamic_context_parallel}={str(model.dynamic_context_parallel).lower()}",
            f"={wanted}",
            f"{NAME.model.dynamic_context_parallel}={str(not model.dynamic_context_parallel).lower()}",
        )


@rule(
    "H17",
    "Selectively recomputed modules do not need the microbatch's group.",
    "mla_up_proj and moe run again during the backward pass, outside their layer. The microbatch's process group is "
    "no longer active there. Whole layers (full) and core_attn keep the group.",
    broken(
        model=dict(
            sequence_packing_scheduler="dp_balanced",
            num_moe_experts=4,
            moe_aux_loss_coeff=0.01,
            recompute_granularity="selective",
            recompute_modules=["moe"],
        )
    ),
)
def recomputation_keeps_the_group(c: Context) -> Iterator[Finding]:
    modules = (c.model.recompute_modules or []) if c.model.recompute_granularity == "selective" else []
    balanced = bool(c.model.num_moe_experts) and c.model.moe_aux_loss_coeff > 0
    lost = [name for name in modules if name == "mla_up_proj" or (name == "moe" and balanced)]
    if c.packed and lost:
        yield Finding(
            NAME.model.recompute_modules,
            f"{', '.join(lost)} would be recomputed with the configured group instead of the microbatch's",
            WHOLE_LAYERS,
            values=[[name for name in modules if name not in lost] or ["core_attn"]],
        )


@rule(
    "H18",
    "For packs, experts are balanced by the plain auxiliary loss.",
    "A pack is not one sequence (seq_aux_loss), ranks run different numbers of packs (global_aux_loss), and "
    "sinkhorn would count padding.",
    broken(
        model=dict(
            sequence_packing_scheduler="dp_balanced",
            num_moe_experts=4,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=0.01,
        )
    ),
)
def router_balance_in_packs(c: Context) -> Iterator[Finding]:
    kind = c.model.moe_router_load_balancing_type
    counts = kind == "sinkhorn" or (kind in ("seq_aux_loss", "global_aux_loss") and c.model.moe_aux_loss_coeff > 0)
    if c.packed and c.model.num_moe_experts and counts:
        yield Finding(
            NAME.model.moe_router_load_balancing_type,
            f"{kind} is not defined for packed microbatches",
            values=["aux_loss", "none"],
        )


@rule(
    "H22",
    "Packs are dispatched to experts by all-to-all.",
    "Packs have different lengths on each rank, and the allgather dispatcher gathers equal lengths only.",
    broken(
        model=dict(sequence_packing_scheduler="dp_balanced", num_moe_experts=4, moe_token_dispatcher_type="allgather")
    ),
)
def token_dispatch_in_packs(c: Context) -> Iterator[Finding]:
    if c.runs_packs and c.model.moe_token_dispatcher_type == "allgather":  # an error also without experts
        yield Finding(
            NAME.model.moe_token_dispatcher_type,
            "Token dispatcher type: allgather does not support variable sequence length, which packs have",
            "=alltoall",
        )


@rule(
    "H19",
    f"Dynamic or evaluation groups with multi-latent attention need {NAME.model.context_parallel_size} of at least 2.",
    "With a configured size of 1 megatron-core cuts rotary embeddings to the tokens of one rank. A sample on "
    "several ranks needs more positions.",
    broken(
        *RING.settings, model=dict(dynamic_context_parallel=True, multi_latent_attention=True, context_parallel_size=1)
    ),
)
def latent_positions(c: Context) -> Iterator[Finding]:
    if (c.model.dynamic_context_parallel or c.eval_cp > 1) and c.model.multi_latent_attention and c.cp == 1:
        yield Finding(
            NAME.model.context_parallel_size,
            "must be at least 2 with multi-latent attention and dynamic or evaluation groups",
            "=2",
        )


@rule(
    "H20",
    f"With packing, {NAME.train.micro_batch_size} is 1.",
    "A micro batch is one pack, and the scheduler chooses its samples.",
    broken(model=dict(sequence_packing_scheduler="dp_balanced"), train=dict(micro_batch_size=2)),
    severity="warning",
)
def packs_have_no_micro_batch_size(c: Context) -> Iterator[Finding]:
    size = c.config.train.micro_batch_size
    if c.packed and size > 1:
        yield Finding(
            NAME.train.micro_batch_size,
            f"{size} has no effect with {NAME.model.sequence_packing_scheduler}={c.model.sequence_packing_scheduler}",
            f"=1 ({NAME.model.max_seqlen_per_dp_cp_rank} limits a microbatch)",
        )
