"""K rules on fused kernels: requirements and side effects."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.modules.te_support import MINIMUM, has_te_layers
from megatron_cp.common.installation import how_to_install
from megatron_cp.config.names import NAME
from megatron_cp.models.fusions import fused_loss, rotary_gap
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.environment import Environment


@rule(
    "K21",
    "The fused cross-entropy is for bf16 and fp16.",
    "megatron-core's fused cross-entropy silently rounds the gradient of the logits to bf16 in every precision. In "
    "fp32 the gradient norm is wrong in the fourth digit.",
    broken(model=dict(cross_entropy_loss_fusion=True)),
)
def fused_cross_entropy_precision(c: Context) -> Iterator[Finding]:
    precision = c.config.mixed_precision
    half = precision.bf16 or precision.fp16 or (c.environment.device == "gpu" and not precision.fp32)
    if fused_loss(c.model, c.te_layers) == "native" and not half:
        yield Finding(
            NAME.model.cross_entropy_loss_fusion,
            "the fused cross-entropy rounds gradients to bf16, but this run is in fp32",
            "=false",
            "mixed_precision=bf16_mixed",
        )


@rule(
    "K34",
    "Requested fused kernels are available.",
    "megatron-core raises a bare RuntimeError or assertion, or silently runs without the kernel.",
    broken(model=dict(apply_rope_fusion=True)),
)
def fused_kernels_are_available(c: Context) -> Iterator[Finding]:
    model, loss = c.model, fused_loss(c.model, c.te_layers)
    kernels = {
        NAME.model.apply_rope_fusion: model.apply_rope_fusion,
        NAME.model.gradient_accumulation_fusion: model.gradient_accumulation_fusion,
        NAME.model.cross_entropy_fusion_impl: loss == "te",
    }
    missing = "there is no GPU" if c.environment.device == "cpu" else "Transformer Engine is not installed"
    there = c.environment.device == "gpu" and c.environment.transformer_engine is not None
    for field, asked in kernels.items():
        if asked and not there:
            yield Finding(field, f"needs a kernel of Transformer Engine, but {missing}", "=null")
    if model.gradient_accumulation_fusion and there and not c.te_layers:
        message = "needs Transformer Engine's layers, which this model does not use"
        yield Finding(NAME.model.gradient_accumulation_fusion, message, "=null")
    gap = rotary_gap(c.model)
    if model.apply_rope_fusion and gap is not None:
        yield Finding(NAME.model.apply_rope_fusion, f"no fused rotary embedding: {gap}", "=null")
    if model.cross_entropy_fusion_impl is not None and loss is None:
        message = "has no effect: the cross-entropy is not fused"
        on = f"{NAME.model.cross_entropy_loss_fusion}=true"
        yield Finding(NAME.model.cross_entropy_fusion_impl, message, "=null", on, severity="warning")


@rule(
    "K57",
    "On a GPU the packages with fast kernels are installed.",
    "Without Transformer Engine the layers are megatron-core's own. Without mamba-ssm and causal-conv1d Mamba "
    "layers are plain PyTorch. Both are exact but slower.",
    broken(environment=Environment(device="gpu", gpus_per_node=8)),
    severity="warning",
)
def packages_for_gpus(c: Context) -> Iterator[Finding]:
    environment, fp32 = c.environment, c.config.mixed_precision.fp32
    if environment.device != "gpu":
        return
    if environment.transformer_engine is None and has_te_layers(c.model, MINIMUM, on_gpu=True, fp32=fp32):
        message = "Transformer Engine is not installed: native attention and megatron-core's layers are used, slower"
        yield Finding(NAME.model.transformer_impl, message, how_to_install("gpu"), "=local (silences this warning)")
    packages = {"mamba-ssm": environment.mamba_ssm, "causal-conv1d": environment.causal_conv1d}
    missing = [name for name, version in packages.items() if version is None]
    if missing and "M" in c.model.layer_letters and not fp32:
        names = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'}"
        message = f"{names} not installed: Mamba layers run in plain PyTorch, slower"
        yield Finding(NAME.model.hybrid_layer_pattern, message, how_to_install("mamba"))
