"""E. Masks, windows, dropout, softmax and determinism of attention."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.modules.te_support import first_versions
from megatron_cp.attention.transports.registry import ALL_TO_ALL, RING
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule, te_rule
from megatron_cp.rules.proposals import NATIVE

te_rule(
    "E1",
    "A sliding window with Transformer Engine needs a transport that has it there.",
    "Its ring does not skip what is outside the window and refuses; its gather computes something else, silently, if "
    f"the mask is not causal. Causal: {first_versions('window')}; not causal: {first_versions('full_window')} (in "
    f"packs {first_versions('full_window_in_packs')}). Our attention has windows on every transport.",
    broken(model=dict(attention_backend="te", window_size=[64, 0]), environment="gpu"),
)


te_rule(
    "E2",
    "No attention dropout together with a sliding window under context parallelism.",
    "Transformer Engine has no kernel for the two together, and our attention has no attention dropout.",
    broken(
        *ALL_TO_ALL.settings,
        model=dict(attention_backend="te", window_size=[64, 0], attention_dropout=0.1),
        environment="gpu",
    ),
)


te_rule(
    "E4",
    f"A softmax offset ({NAME.model.softmax_type}) with Transformer Engine needs {ALL_TO_ALL.name}.",
    "Its other transports merge partial results without it. In packs it is there since 2.12, on one rank too. Our "
    "attention has it on every transport.",
    broken(model=dict(attention_backend="te", softmax_type="learnable"), environment="gpu"),
)


@rule(
    "E8",
    "No attention mask is made from the data.",
    "Attention under context parallelism is causal or full; a mask that a dataset makes at document borders is ignored "
    "silently upstream, and would be a [s, s] tensor. Packing keeps documents apart without one.",
    broken(dataset=dict(reset_attention_mask=True)),
)
def no_mask_from_data(c: Context) -> Iterator[Finding]:
    if c.config.dataset.reset_attention_mask:
        yield Finding(
            NAME.dataset.reset_attention_mask,
            "the mask would be ignored: attention sees over document borders as before",
            "=false",
            f"=false {NAME.model.sequence_packing_scheduler}=dp_balanced (separates documents)",
        )


@rule(
    "E9",
    "Positions are restarted at document borders for learned embeddings only.",
    "megatron-core's rotary embedding, which shows attention distances only, counts from the start of the sequence "
    "whatever position_ids say, silently. Without position embeddings nothing reads them but multi-token prediction, "
    "which counts its targets by them.",
    broken(dataset=dict(reset_position_ids=True)),
)
def no_restarted_positions(c: Context) -> Iterator[Finding]:
    kind = c.model.position_embedding_type
    if c.config.dataset.reset_position_ids and kind != "learned_absolute":
        yield Finding(
            NAME.dataset.reset_position_ids,
            f"position_ids would be ignored with {NAME.model.position_embedding_type}={kind}",
            "=false",
        )


@rule(
    "E11",
    "Attention dropout needs Transformer Engine's attention.",
    f"Our attention is exact and has none; {NAME.model.hidden_dropout} works everywhere.",
    broken(model=dict(attention_dropout=0.1)),
)
def attention_dropout(c: Context) -> Iterator[Finding]:
    if c.model.attention_dropout and c.backend == "native":
        yield Finding(
            NAME.model.attention_dropout,
            f"{NAME.model.attention_dropout} is not supported by our attention, which this run uses",
            f"=0 ({NAME.model.hidden_dropout} still regularizes)",
        )


@rule(
    "E13",
    "Transformer Engine has a kernel left: flash or fused attention, in bf16 or fp16.",
    "Its unfused attention has no context parallelism; NVTE_FUSED_ATTN=0 without flash attention leaves nothing.",
    broken(
        "env_vars.NVTE_FUSED_ATTN=0",
        "env_vars.NVTE_FLASH_ATTN=0",
        model=dict(attention_backend="te"),
        environment="gpu",
    ),
)
def a_kernel_is_left(c: Context) -> Iterator[Finding]:
    yield from c.te_findings("E13")
    if c.backend == "te" and c.widest > 1:
        flash = c.environment.flash_attn is not None and c.variable("NVTE_FLASH_ATTN") != "0"
        if c.variable("NVTE_FUSED_ATTN") == "0" and not flash:
            yield Finding(
                "env_vars.NVTE_FUSED_ATTN",
                "No dot product attention backend is available: fused attention is off by NVTE_FUSED_ATTN=0, and flash "
                "attention is off or not installed",
                c.set_variable("NVTE_FUSED_ATTN", "1"),
                NATIVE,
            )


@rule(
    "E15",
    "Determinism asked for is determinism given.",
    "Transformer Engine reads NVTE_ALLOW_NONDETERMINISTIC_ALGO, NCCL chooses algorithms by itself, the fused "
    "cross-entropy is not deterministic, and mamba-ssm's gradients are added up in any order.",
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
            "is not set: NCCL may choose another reduction order on the next run",
            "=Ring",
            severity="warning",
        )
    if c.environment.device == "gpu" and "M" in c.model.parts:
        for name in ("MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC"):
            if c.variable(name) != "1":
                yield Finding(
                    f"env_vars.{name}",
                    "is not 1: mamba-ssm, where installed, adds gradients up in any order",
                    c.set_variable(name, "1"),
                    severity="warning",
                )


@rule(
    "E16",
    "Deterministic packed attention on Hopper needs a large workspace, for Transformer Engine.",
    "cuDNN's deterministic backward pass for thd keeps partial gradients of all tiles.",
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
            "the deterministic backward pass of packed attention may run out of memory on Hopper",
            NATIVE,
        )


te_rule(
    "E17",
    f"{NAME.model.qk_clip} and {NAME.model.log_max_attention_logit} need our attention.",
    "It measures the largest score on every transport, in packs too. Transformer Engine's is not read here.",
    broken(model=dict(attention_backend="te", qk_clip=True), environment="gpu"),
)


@rule(
    "E18",
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
