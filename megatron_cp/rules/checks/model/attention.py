"""E rules: masks, windows, dropout, softmax and determinism of attention."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.modules.te_support import first_versions
from megatron_cp.attention.transports.registry import ALL_TO_ALL, RING
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule, te_rule
from megatron_cp.rules.proposals import NATIVE

te_rule(
    "E1",
    "A sliding window with Transformer Engine needs a transport that supports windows there.",
    "Transformer Engine's ring rejects windows. Its gather silently computes another result if the mask is not "
    f"causal. Causal: {first_versions('window')}; not causal: {first_versions('full_window')} (in packs "
    f"{first_versions('full_window_in_packs')}). The native attention supports windows on every transport.",
    broken(model=dict(attention_backend="te", window_size=[64, 0]), environment="gpu"),
)


te_rule(
    "E2",
    "Attention dropout and a sliding window exclude each other under context parallelism.",
    "Transformer Engine has no kernel for both, and the native attention has no attention dropout.",
    broken(
        *ALL_TO_ALL.settings,
        model=dict(attention_backend="te", window_size=[64, 0], attention_dropout=0.1),
        environment="gpu",
    ),
)


te_rule(
    "E4",
    f"A softmax offset ({NAME.model.softmax_type}) with Transformer Engine needs {ALL_TO_ALL.name}.",
    "Its other transports merge partial results without the offset. In packs Transformer Engine supports it since "
    "2.12, also on one rank. The native attention supports it on every transport.",
    broken(model=dict(attention_backend="te", softmax_type="learnable"), environment="gpu"),
)


@rule(
    "E8",
    "Attention masks are not built from the data.",
    "Attention under context parallelism is causal or full. Upstream silently ignores a mask that a dataset builds "
    "at document boundaries, and the mask would be a [s, s] tensor. Packing separates documents without a mask.",
    broken(dataset=dict(reset_attention_mask=True)),
)
def no_mask_from_data(c: Context) -> Iterator[Finding]:
    if c.config.dataset.reset_attention_mask:
        yield Finding(
            NAME.dataset.reset_attention_mask,
            "the mask has no effect: attention crosses document boundaries",
            "=false",
            f"=false {NAME.model.sequence_packing_scheduler}=dp_balanced (separates documents)",
        )


@rule(
    "E9",
    "Positions restart at document boundaries for learned embeddings only.",
    "megatron-core's rotary embedding silently ignores position_ids and counts from the start of the sequence. "
    "Without position embeddings only multi-token prediction reads position_ids, to count targets.",
    broken(dataset=dict(reset_position_ids=True)),
)
def no_restarted_positions(c: Context) -> Iterator[Finding]:
    kind = c.model.position_embedding_type
    if c.config.dataset.reset_position_ids and kind != "learned_absolute":
        yield Finding(
            NAME.dataset.reset_position_ids,
            f"position_ids have no effect with {NAME.model.position_embedding_type}={kind}",
            "=false",
        )


@rule(
    "E11",
    "Attention dropout needs Transformer Engine's attention.",
    f"The native attention is exact and has no dropout; {NAME.model.hidden_dropout} works everywhere.",
    broken(model=dict(attention_dropout=0.1)),
)
def attention_dropout(c: Context) -> Iterator[Finding]:
    if c.model.attention_dropout and c.backend == "native":
        yield Finding(
            NAME.model.attention_dropout,
            "the native attention, which this run uses, does not support attention dropout",
            f"=0 ({NAME.model.hidden_dropout} works)",
        )


@rule(
    "E13",
    "Transformer Engine needs flash or fused attention, in bf16 or fp16.",
    "Transformer Engine's unfused attention has no context parallelism. NVTE_FUSED_ATTN=0 without flash attention "
    "leaves no kernel.",
    broken(
        "env_vars.NVTE_FUSED_ATTN=0",
        "env_vars.NVTE_FLASH_ATTN=0",
        model=dict(attention_backend="te"),
        environment="gpu",
    ),
)
def kernel_is_available(c: Context) -> Iterator[Finding]:
    yield from c.te_findings("E13")
    if c.backend == "te" and c.max_cp > 1:
        flash = c.environment.flash_attn is not None and c.variable("NVTE_FLASH_ATTN") != "0"
        if c.variable("NVTE_FUSED_ATTN") == "0" and not flash:
            yield Finding(
                "env_vars.NVTE_FUSED_ATTN",
                "No dot product attention backend is available: fused attention is off, and flash attention is off or "
                "not installed",
                c.set_variable("NVTE_FUSED_ATTN", "1"),
                NATIVE,
            )


@rule(
    "E15",
    f"{NAME.model.deterministic_mode} needs deterministic kernels and reductions.",
    "Transformer Engine reads NVTE_ALLOW_NONDETERMINISTIC_ALGO, and NCCL chooses algorithms by itself. The fused "
    "cross-entropy is not deterministic. By default mamba-ssm sums gradients in any order.",
    broken("mixed_precision=bf16_mixed", model=dict(deterministic_mode=True, cross_entropy_loss_fusion=True)),
)
def determinism(c: Context) -> Iterator[Finding]:
    if not c.model.deterministic_mode:
        return
    if c.model.cross_entropy_loss_fusion:
        yield Finding(
            NAME.model.cross_entropy_loss_fusion, "Cross Entropy Fusion is currently not deterministic", "=false"
        )
    if c.backend == "te" and c.variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO") != "0":
        yield Finding(
            "env_vars.NVTE_ALLOW_NONDETERMINISTIC_ALGO",
            "deterministic_mode is on and we are using DotProductAttention from Transformer Engine, but "
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO is not 0",
            c.set_variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
        )
    if c.environment.device == "gpu" and c.world_size > 1 and not c.variable("NCCL_ALGO"):
        yield Finding(
            "env_vars.NCCL_ALGO",
            "not set: NCCL may choose another reduction order in the next run",
            "=Ring",
            severity="warning",
        )
    if c.environment.device == "gpu" and "M" in c.model.layer_letters:
        for name in ("MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC"):
            if c.variable(name) != "1":
                yield Finding(
                    f"env_vars.{name}",
                    "not 1: mamba-ssm, if installed, sums gradients in any order",
                    c.set_variable(name, "1"),
                    severity="warning",
                )


@rule(
    "E16",
    "Deterministic packed attention on Hopper needs a large workspace in Transformer Engine.",
    "cuDNN's deterministic backward pass for thd keeps the partial gradients of all tiles.",
    broken(
        *RING.settings,
        "env_vars.NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        model=dict(deterministic_mode=True, sequence_packing_scheduler="dp_balanced"),
        environment="gpu",
    ),
    severity="warning",
)
def deterministic_packing(c: Context) -> Iterator[Finding]:
    hopper = c.environment.compute_capability == 9.0
    if c.backend == "te" and c.model.deterministic_mode and c.packed and hopper:
        yield Finding(
            NAME.model.deterministic_mode,
            "on Hopper the deterministic backward pass of packed attention may run out of memory",
            NATIVE,
        )


te_rule(
    "E21",
    f"{NAME.model.qk_clip} and {NAME.model.log_max_attention_logit} need our attention.",
    "It measures the largest score on every transport, in packs too. Transformer Engine's is not read here.",
    broken(model=dict(attention_backend="te", qk_clip=True), environment="gpu"),
)


@rule(
    "E22",
    f"{NAME.model.qk_clip} finds weights that decide the scores.",
    "A norm of queries and keys undoes the clipping. With fewer key/value heads than tensor-parallel ranks a rank has "
    "other rows of the weights than its heads'.",
    broken(model=dict(qk_clip=True, qk_layernorm=True)),
)
def clipping_has_an_effect(c: Context) -> Iterator[Finding]:
    if not c.model.qk_clip or c.model.multi_latent_attention:
        return
    for field in (NAME.model.qk_layernorm, NAME.model.qk_l2_norm):
        if c.config.value_at(field):
            message = f"{field} divides by the size of queries and keys, and undoes the clipping"
            yield Finding(NAME.model.qk_clip, message, "=false", f"{field}=false")
    if c.model.kv_heads < c.tp:
        message = f"{c.tp} tensor-parallel ranks share {c.model.kv_heads} key/value heads"
        smaller = f"{NAME.model.tensor_model_parallel_size}={c.model.kv_heads}"
        yield Finding(NAME.model.qk_clip, message, "=false", smaller)
