"""F rules on packed sequences, and H23. :mod:`megatron_cp.rules.batch` has more."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.modules.te_support import first_versions
from megatron_cp.attention.transports.registry import ALL_GATHER, RING
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule, te_rule
from megatron_cp.rules.proposals import NATIVE, typed


@rule(
    "F3",
    "In Transformer Engine, padding between packed sequences needs fused attention.",
    "Under context parallelism every sequence is padded to a multiple of 2 * cp. Flash attention 2 cannot skip the "
    "padding.",
    broken(
        *RING.settings,
        "env_vars.NVTE_FUSED_ATTN=0",
        model=dict(attention_backend="te", sequence_packing_scheduler="dp_balanced"),
        environment="gpu",
    ),
)
def padding_needs_fused_attention(c: Context) -> Iterator[Finding]:
    if c.backend == "te" and c.runs_packs and c.max_cp > 1 and c.variable("NVTE_FUSED_ATTN") == "0":
        yield Finding(
            "env_vars.NVTE_FUSED_ATTN",
            "packed sequences with padding need Transformer Engine's fused attention",
            c.set_variable("NVTE_FUSED_ATTN", "1"),
            NATIVE,
        )


te_rule(
    "F5",
    "Packed sequences need a Transformer Engine that supports packs on the transport.",
    f"Supported: {first_versions('packs')}. The native attention supports packs on every transport. Before 2.18 the "
    "host waits for the GPU at each sequence in an all-to-all of packs. This is slow, and gives a warning with "
    "attention_backend=te.",
    broken(
        *ALL_GATHER.settings,
        model=dict(attention_backend="te", sequence_packing_scheduler="dp_balanced"),
        environment="gpu",
    ),
)

te_rule(
    "F17",
    "Transformer Engine's attention takes packs in zigzag only.",
    f"The native attention takes every {NAME.model.packed_placement}.",
    broken(
        *RING.settings,
        model=dict(attention_backend="te", sequence_packing_scheduler="dp_balanced", packed_placement="balanced"),
        environment="gpu",
    ),
)


@rule(
    "F18",
    "Mamba layers need packs in zigzag.",
    "Their all-to-all puts the tokens of a zigzag pack in order, and no other placement's.",
    broken(
        *RING.settings,
        model=dict(
            architecture="hybrid",
            hybrid_layer_pattern="M*M*",
            mamba_num_groups=4,
            sequence_packing_scheduler="dp_balanced",
            packed_placement="balanced",
        ),
    ),
)
def mamba_is_in_zigzag(c: Context) -> Iterator[Finding]:
    if "M" in c.model.layer_letters and c.runs_packs and c.max_cp > 1 and c.model.packed_placement != "zigzag":
        yield Finding(NAME.model.packed_placement, "not supported with Mamba layers", "=zigzag")


@rule(
    "H23",
    "Dynamic context parallelism needs samples that do not fit on one rank.",
    "A group has one rank while samples fit on one, except where a few samples balance better on more. The default "
    f"limit is the tokens of {NAME.model.context_parallel_size} ranks; with 1, the longest sample.",
    broken(*RING.settings, model=dict(dynamic_context_parallel=True, context_parallel_size=1)),
    severity="warning",
)
def dynamic_groups_are_useful(c: Context) -> Iterator[Finding]:
    model, longest, ranks = c.model, c.config.dataset.seq_length, c.dp * c.cp
    limit, smallest = model.max_seqlen_per_dp_cp_rank, model.min_dynamic_context_parallel_size
    if model.dynamic_context_parallel and c.divisible and limit is not None and ranks > 1 >= smallest:
        unit = 2 * (c.tp if model.sequence_parallel else 1)
        shared = -(-longest // (min(ranks, c.node_size or 8) * unit)) * unit
        if longest <= limit and shared < limit:
            field = NAME.model.max_seqlen_per_dp_cp_rank
            yield Finding(
                field,
                f"the longest sample has {longest} tokens and fits on one rank: dynamic groups of several ranks will "
                "be rare, with no gain over static packing",
                f"{typed(field, shared)} (choose the tokens that one rank's memory allows)",
                f"{NAME.model.dynamic_context_parallel}=false {NAME.model.sequence_packing_scheduler}=dp_balanced",
            )
