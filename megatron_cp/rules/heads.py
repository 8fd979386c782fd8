"""D. Heads and head dims: what an all-to-all can hand out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_cp.rules.environment import PRESETS
from megatron_cp.rules.rule import Context, Finding, broken, divisors, listed, rule

_OLD = replace(PRESETS["gpu"], transformer_engine="2.10.0")


def _heads_finding(c: Context, transport: str) -> Iterator[Finding]:
    for kind, size in c.a2a_sizes():
        if kind == transport and c.heads % size:
            largest = max(d for d in divisors(c.cp) if c.heads % d == 0)
            field = "model.cp_comm_type" if kind == "a2a" else "model.hierarchical_context_parallel_sizes"
            yield Finding(
                field,
                f"cp_comm_type='{kind}' requires num_heads % cp_size == 0: {c.config.model.num_attention_heads} heads "
                f"/ tp {c.tp} = {c.heads} do not divide by {size}",
                f"largest a2a size here is {largest}: a2a+p2p with [{largest}, {c.cp // largest}], p2p or all_gather",
            )
    yield from c.te_findings("D1" if transport == "a2a" else "D2")


@rule(
    "D1",
    "With a2a, cp divides the heads of a tensor-parallel rank.",
    "The all-to-all gives each rank whole heads. Transformer Engine asks the same of key/value heads; our attention "
    "gives several ranks the same one.",
    broken("model.cp_comm_type=a2a", "model.hierarchical_context_parallel_sizes=null", "model.num_attention_heads=6",
           "model.num_query_groups=6", "model.hidden_size=96"),
)  # fmt: skip
def heads_divide_by_cp(c: Context) -> Iterator[Finding]:
    yield from _heads_finding(c, "a2a")


@rule(
    "D2",
    "With a2a+p2p, the a2a size divides the heads of a tensor-parallel rank.",
    "As D1; Transformer Engine does not check it and fails in a view.",
    broken("model.num_attention_heads=9", "model.num_query_groups=9", "model.hidden_size=144"),
)
def heads_divide_by_a2a(c: Context) -> Iterator[Finding]:
    yield from _heads_finding(c, "a2a+p2p")


@rule(
    "D3",
    "With an all-to-all, each rank's heads and key/value heads are even in number, for Transformer Engine.",
    "Its fused (cuDNN) attention is disabled otherwise and only flash attention is left.",
    broken(
        "model.num_attention_heads=9", "model.num_query_groups=9", "model.hidden_size=144", "dataset.seq_length=252",
        "model.context_parallel_size=3", "model.hierarchical_context_parallel_sizes=[3,1]",
        world_size=3, environment="gpu",
    ),
    severity="warning",
    needs="config environment",
)  # fmt: skip
def even_heads(c: Context) -> Iterator[Finding]:
    if c.backend == "te":
        for kind, size in c.a2a_sizes():
            odd = [n for n in (c.heads, c.kv_heads) if n % 2]
            if odd and size > 1:
                yield Finding(
                    "model.num_query_groups",
                    f"{listed(odd)} heads on a tensor-parallel rank is odd; with {kind} over {size} ranks Transformer "
                    "Engine can use flash attention only",
                )


@rule(
    "D4",
    "With an all-to-all, Transformer Engine needs at least as many key/value heads as tp ranks.",
    "Fewer are already shared between tensor-parallel ranks and cannot be handed out further.",
    broken(
        "model.attention_backend=te", "model.num_query_groups=2", "model.tensor_model_parallel_size=4",
        world_size=16, environment="gpu",
    ),
    needs="config environment",
)  # fmt: skip
def enough_kv_heads(c: Context) -> Iterator[Finding]:
    yield from c.te_findings("D4")


@rule(
    "D5",
    "A head dim above 128 leaves few kernels under context parallelism, for Transformer Engine.",
    "The fused backward pass for head dim 256 exists on Blackwell with p2p and all_gather only.",
    broken("model.kv_channels=256", environment="gpu"),
    severity="warning",
    needs="config environment",
)
def large_head_dim(c: Context) -> Iterator[Finding]:
    dim = c.config.model.kv_channels or 0
    if c.backend == "te" and c.cp > 1 and dim > 128 and not c.config.model.multi_latent_attention:
        yield Finding(
            "model.kv_channels",
            f"head dim {dim}: Transformer Engine may have flash attention only, or nothing, on this GPU",
            "model.attention_backend=native if it finds no kernel",
        )


@rule(
    "D6",
    "Multi-latent attention under context parallelism needs a Transformer Engine that has it.",
    "Its queries and values have different head dims: since 2.8 with p2p and a2a+p2p, since 2.15 with all transports.",
    broken(
        "model.attention_backend=te", "model.multi_latent_attention=true", "model.cp_comm_type=a2a",
        "model.hierarchical_context_parallel_sizes=null", environment=_OLD,
    ),
    needs="config environment",
)  # fmt: skip
def mla_version(c: Context) -> Iterator[Finding]:
    yield from c.te_findings("D6")


@rule(
    "D7",
    "Mamba's heads and groups divide over tp * cp.",
    "Its mixer exchanges sequence for heads over the whole context-parallel group, whatever cp_comm_type says.",
    broken("model.architecture=hybrid", "model.hybrid_layer_pattern=M*M*", "model.mamba_num_heads=6"),
)
def mamba_heads_divide(c: Context) -> Iterator[Finding]:
    model = c.config.model
    if model.architecture != "hybrid" or "M" not in (model.hybrid_layer_pattern or ""):
        return
    heads = model.mamba_num_heads or 2 * model.hidden_size // max(1, model.mamba_head_dim)
    parts = c.tp * c.cp
    if heads % parts:
        yield Finding(
            "model.mamba_num_heads",
            f"nheads must be evenly divisible by tp_size * cp_size: {heads} by {parts}",
            f"a multiple of {parts}, or tp * cp among {listed(divisors(heads))}",
        )
    groups = model.mamba_num_groups // c.tp
    if model.mamba_num_groups % c.tp or groups < 1:
        message = f"{model.mamba_num_groups} groups do not divide over tp {c.tp}"
    elif groups < c.cp and c.cp % groups:
        message = f"cp_size must be evenly divisible by ngroups/tp_size: {c.cp} by {groups}"
    elif groups >= c.cp and groups % c.cp:
        message = f"ngroups must be evenly divisible by tp_size * cp_size: {model.mamba_num_groups} by {parts}"
    else:
        return
    yield Finding("model.mamba_num_groups", message, f"a multiple of {parts}")
