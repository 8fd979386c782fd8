"""D rules: how an all-to-all divides heads, and head dims that kernels support."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_cp.attention.modules.te_support import first_versions, odd_heads
from megatron_cp.attention.transports.registry import ALL_TO_ALL, HIERARCHICAL, LEVELS, RING
from megatron_cp.config.names import NAME
from megatron_cp.models.layers.mamba.shape import MambaShape
from megatron_cp.rules.base import Context, Finding, broken, rule, te_rule
from megatron_cp.rules.checks.parallel.context_parallel import FLAT, plain_transports, splits
from megatron_cp.rules.environment import PRESETS
from megatron_cp.rules.proposals import NATIVE, closest, default_of, divisors, either, nearest_multiples, one_of

_OLD = replace(PRESETS["gpu"], transformer_engine="2.10.0")


def _heads_finding(c: Context, *, hierarchical: bool) -> Iterator[Finding]:
    for transport, size in c.head_splits():
        if transport.hierarchical == hierarchical and c.local_heads % size:
            levels = [f"{HIERARCHICAL.settings[0]} {sizes}" for sizes in reversed(splits(c))]
            fix = either(*levels, *plain_transports(c))
            if not hierarchical and size != c.cp:  # a group of packs: one level in Transformer Engine
                fix = either(FLAT, NATIVE)
            field = NAME.model.hierarchical_context_parallel_sizes if hierarchical else NAME.model.cp_comm_type
            yield Finding(
                field,
                f"{NAME.model.cp_comm_type}='{transport.name}' requires num_heads % cp_size == 0: "
                f"{c.model.num_attention_heads} heads / tp {c.tp} = {c.local_heads} is not divisible by the {size} "
                "ranks of the all-to-all",
                fix,
            )
    yield from c.te_findings("D2" if hierarchical else "D1")


@rule(
    "D1",
    f"With {ALL_TO_ALL.name}, cp divides the heads of a tensor-parallel rank.",
    "The all-to-all gives each rank whole heads. Transformer Engine requires the same of key/value heads; the "
    "native attention gives one key/value head to several ranks.",
    broken(*ALL_TO_ALL.settings, model=dict(num_attention_heads=6, num_query_groups=6, hidden_size=96)),
)
def heads_divide_by_cp(c: Context) -> Iterator[Finding]:
    yield from _heads_finding(c, hierarchical=False)


@rule(
    "D2",
    f"With {HIERARCHICAL.name}, the {LEVELS[0]} size divides the heads of a tensor-parallel rank.",
    "The all-to-all gives each rank whole heads. Transformer Engine does not check it and fails in a view.",
    broken(model=dict(num_attention_heads=9, num_query_groups=9, hidden_size=144)),
)
def heads_divide_by_a2a(c: Context) -> Iterator[Finding]:
    yield from _heads_finding(c, hierarchical=True)


@rule(
    "D3",
    "With an all-to-all, Transformer Engine needs an even number of heads and key/value heads per rank.",
    "Otherwise Transformer Engine disables its fused (cuDNN) attention from 2.15 on, also where the all-to-all "
    "level has one rank. Only flash attention remains, if installed.",
    broken(
        model=dict(
            num_attention_heads=9,
            num_query_groups=9,
            hidden_size=144,
            context_parallel_size=3,
            hierarchical_context_parallel_sizes=[3, 1],
        ),
        dataset=dict(seq_length=252),
        world_size=3,
        environment="gpu",
    ),
    severity="warning",
)
def even_heads(c: Context) -> Iterator[Finding]:
    yield from c.te_findings("D3")
    version, flash = c.environment.transformer_engine, c.environment.flash_attn is not None
    odd = odd_heads(c.model, version) if c.backend == "te" and version is not None and flash else ""
    if odd:
        for transport, size in c.head_splits():
            yield Finding(
                NAME.model.num_query_groups,
                f"odd numbers of heads per tensor-parallel rank ({odd}): with {transport.name} over {size} ranks "
                "Transformer Engine has flash attention only",
                FLAT,
                NATIVE,
            )


te_rule(
    "D4",
    "With an all-to-all, Transformer Engine needs at least as many key/value heads as tp ranks.",
    "Fewer heads are already shared between tensor-parallel ranks and cannot be divided further.",
    broken(
        model=dict(attention_backend="te", num_query_groups=2, tensor_model_parallel_size=4),
        world_size=16,
        environment="gpu",
    ),
)


@rule(
    "D5",
    "A head dim above 128 has few Transformer Engine kernels under context parallelism.",
    "The fused backward pass for head dim 256 exists on Blackwell only, and without an all-to-all.",
    broken(model=dict(kv_channels=256), environment="gpu"),
    severity="warning",
)
def large_head_dim(c: Context) -> Iterator[Finding]:
    dim = c.model.kv_channels or 0
    if c.backend == "te" and c.max_cp > 1 and dim > 128 and not c.model.multi_latent_attention:
        yield Finding(
            NAME.model.kv_channels,
            "above 128 Transformer Engine may have flash attention only, or no kernel, on this GPU",
            f"{NATIVE} (silences this warning)",
        )


te_rule(
    "D6",
    "Multi-latent attention under context parallelism needs a recent Transformer Engine.",
    f"Queries and values of multi-latent attention have different head dims: {first_versions('different_head_dims')}.",
    broken(*ALL_TO_ALL.settings, model=dict(attention_backend="te", multi_latent_attention=True), environment=_OLD),
)


@rule(
    "D7",
    "tp * cp divides Mamba's heads and groups.",
    "A Mamba mixer exchanges sequence for heads over the whole context-parallel group, for every "
    f"{NAME.model.cp_comm_type}. Dynamic groups and evaluation's own groups divide heads as evenly as possible; each "
    "rank needs at least one.",
    broken(
        model=dict(architecture="hybrid", hybrid_layer_pattern="M*M*", mamba_num_heads=6, mamba_num_groups=2),
    ),
)
def mamba_heads_divide(c: Context) -> Iterator[Finding]:
    model = c.model
    if model.architecture != "hybrid" or "M" not in (model.hybrid_layer_pattern or ""):
        return
    dynamic = model.dynamic_context_parallel
    heads, groups, cp = MambaShape.of(model).heads, max(1, model.mamba_num_groups), 1 if dynamic else c.cp
    parts = c.tp * cp
    if heads % parts:
        yield Finding(
            NAME.model.mamba_num_heads,
            f"nheads must be evenly divisible by tp_size * cp_size: {heads} by {parts}",
            one_of(NAME.model.context_parallel_size, [d for d in reversed(divisors(c.cp)) if heads % (c.tp * d) == 0]),
            values=nearest_multiples(heads, math.lcm(parts, groups)),
        )
    elif (dynamic or c.eval_cp > 1) and c.divisible and heads // c.tp < c.max_cp:
        most = heads // c.tp
        fewer = [size for size in reversed(divisors(c.dp * c.cp)) if size <= most]
        who, instead = f"an evaluation group has {c.max_cp}", one_of(NAME.dist.eval_context_parallel_size, fewer)
        if dynamic:
            who = f"a dynamic group may have dp * cp = {c.max_cp}"
            instead = f"{NAME.model.dynamic_context_parallel}=false {NAME.model.sequence_packing_scheduler}=dp_balanced"
        yield Finding(
            NAME.model.mamba_num_heads,
            f"{who} ranks, but {heads} heads / tp {c.tp} are enough for {most} ranks only",
            instead,
            values=[math.lcm(c.max_cp * c.tp, groups)],
        )
    local = groups // c.tp
    if groups % c.tp:
        message = f"{groups} groups are not divisible by tp {c.tp}"
    elif heads % groups:
        message = f"nheads must be evenly divisible by ngroups: {heads} by {groups}"
    elif local < cp and cp % local:
        message = f"cp_size must be evenly divisible by ngroups/tp_size: {cp} by {local}"
    elif local >= cp and local % cp:
        message = f"ngroups must be evenly divisible by tp_size * cp_size: {groups} by {parts}"
    else:
        return
    valid = [n for n in divisors(heads) if n % c.tp == 0 and (n // c.tp % cp == 0 or cp % (n // c.tp) == 0)]
    fitting = one_of(NAME.model.mamba_num_groups, closest(valid, groups))
    yield Finding(
        NAME.model.mamba_num_groups, message, fitting or f"{NAME.model.mamba_num_heads}={math.lcm(parts, groups)}"
    )


@rule(
    "D12",
    "Sizes of a Mamba layer are at least 1, and heads divide its width.",
    f"Without {NAME.model.mamba_num_heads} the inner width is twice the hidden size, in heads of mamba_head_dim.",
    broken(
        *RING.settings,
        model=dict(
            architecture="hybrid",
            hybrid_layer_pattern="M*M*",
            mamba_head_dim=48,
            mamba_num_groups=1,
            context_parallel_size=1,
        ),
        train=dict(micro_batch_size=4),
    ),
)
def mamba_sizes(c: Context) -> Iterator[Finding]:
    model = c.model
    if model.architecture != "hybrid":
        return
    names = NAME.model
    for field in (names.mamba_state_dim, names.mamba_head_dim, names.mamba_num_groups, names.mamba_num_heads):
        value = c.config.value_at(field)
        if value is not None and value < 1:
            yield Finding(field, f"must be an integer of at least 1, got {value}", default_of(field))
    width = 2 * model.hidden_size
    if model.mamba_num_heads is None and model.mamba_head_dim > 0 and width % model.mamba_head_dim:
        yield Finding(
            NAME.model.mamba_head_dim,
            f"d_inner must be evenly divisible by headdim: {width} by {model.mamba_head_dim}",
            values=closest(divisors(width), model.mamba_head_dim),
        )


te_rule(
    "D13",
    "With Transformer Engine, head dims are multiples of 8.",
    "Its flash and fused attention support no others; the remaining kernel has no context parallelism and no packs. "
    "The native attention pads head dims.",
    broken(model=dict(attention_backend="te", kv_channels=20, position_embedding_type="none"), environment="gpu"),
)
