"""F. Packed sequences, and H23 of their groups. What only a batch can tell is in :mod:`megatron_cp.rules.batch`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.modules.te_support import first_versions
from megatron_cp.attention.transports.registry import ALL_GATHER, RING
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule, te_rule
from megatron_cp.rules.proposals import NATIVE, typed


@rule(
    "F3",
    "Padding between packed sequences needs fused attention, for Transformer Engine.",
    "Under context parallelism every sequence is padded to a multiple of 2 * cp; flash attention 2 cannot skip that.",
    broken(
        *RING.settings,
        "env_vars.NVTE_FUSED_ATTN=0",
        model=dict(attention_backend="te", sequence_packing_scheduler="dp_balanced"),
        environment="gpu",
    ),
)
def padding_needs_fused_attention(c: Context) -> Iterator[Finding]:
    if c.backend == "te" and c.packs and c.widest > 1 and c.variable("NVTE_FUSED_ATTN") == "0":
        yield Finding(
            "env_vars.NVTE_FUSED_ATTN",
            "is 0, and packed sequences with padding between them need Transformer Engine's fused attention",
            c.set_variable("NVTE_FUSED_ATTN", "1"),
            NATIVE,
        )


te_rule(
    "F5",
    "Packed sequences need a Transformer Engine that has them on the transport.",
    f"It has them: {first_versions('packs')}. Our attention has them on every transport. Before 2.18 an all-to-all of "
    "them makes the host wait for the GPU, for each sequence: slow, a warning where it is asked for.",
    broken(
        *ALL_GATHER.settings,
        model=dict(attention_backend="te", sequence_packing_scheduler="dp_balanced"),
        environment="gpu",
    ),
)


@rule(
    "H23",
    "Dynamic context parallelism has samples that one rank does not hold.",
    "Groups are of one rank as long as samples fit there, but for few samples that balance so. The default limit is "
    f"that of {NAME.model.context_parallel_size} ranks: with one of them, the longest sample.",
    broken(*RING.settings, model=dict(dynamic_context_parallel=True, context_parallel_size=1)),
    severity="warning",
)
def dynamic_groups_have_a_use(c: Context) -> Iterator[Finding]:
    model, longest, ranks = c.model, c.config.dataset.seq_length, c.dp * c.cp
    limit, smallest = model.max_seqlen_per_dp_cp_rank, model.min_dynamic_context_parallel_size
    if model.dynamic_context_parallel and c.divisible and limit is not None and ranks > 1 >= smallest:
        unit = 2 * (c.tp if model.sequence_parallel else 1)
        shared = -(-longest // (min(ranks, c.node_size or 8) * unit)) * unit
        if longest <= limit and shared < limit:
            field = NAME.model.max_seqlen_per_dp_cp_rank
            yield Finding(
                field,
                f"a rank holds {limit} tokens, and the longest sample has {longest}: nearly all groups will be of one "
                "rank, with no gain over packs of static context parallelism",
                f"{typed(field, shared)} (tokens that the memory of one rank allows)",
                f"{NAME.model.dynamic_context_parallel}=false {NAME.model.sequence_packing_scheduler}=dp_balanced",
            )
