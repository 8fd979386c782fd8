"""K. Fused kernels: what they need, and what they change."""

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
    "megatron-core's own rounds the gradient of the logits to bf16 whatever the precision, silently: in fp32 the "
    "gradient norm is wrong in the fourth digit.",
    broken(model=dict(cross_entropy_loss_fusion=True)),
)
def fused_cross_entropy_precision(c: Context) -> Iterator[Finding]:
    precision = c.config.mixed_precision
    half = precision.bf16 or precision.fp16 or (c.environment.device == "gpu" and not precision.fp32)
    if fused_loss(c.model, c.te_layers) == "native" and not half:
        yield Finding(
            NAME.model.cross_entropy_loss_fusion,
            "the fused cross-entropy rounds gradients to bf16, and this run is in fp32",
            "=false",
            "mixed_precision=bf16_mixed",
        )


@rule(
    "K34",
    "Fused kernels that are asked for are there.",
    "megatron-core stops with a bare RuntimeError or assertion, or does without them.",
    broken(model=dict(apply_rope_fusion=True)),
)
def fused_kernels_are_there(c: Context) -> Iterator[Finding]:
    model, loss = c.model, fused_loss(c.model, c.te_layers)
    kernels = {
        NAME.model.apply_rope_fusion: model.apply_rope_fusion,
        NAME.model.gradient_accumulation_fusion: model.gradient_accumulation_fusion,
        NAME.model.cross_entropy_fusion_impl: loss == "te",
    }
    missing = "there is no GPU" if c.environment.device == "cpu" else "it is not installed"
    there = c.environment.device == "gpu" and c.environment.transformer_engine is not None
    for field, asked in kernels.items():
        if asked and not there:
            yield Finding(field, f"asks for a kernel of Transformer Engine, and {missing}", "=null")
    if model.gradient_accumulation_fusion and there and not c.te_layers:
        message = "is done by Transformer Engine's layers, and this model's are others"
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
    "On a GPU the packages are there whose kernels a run would use.",
    "Without Transformer Engine layers are megatron-core's own, without mamba-ssm and causal-conv1d Mamba layers are "
    "plain PyTorch: as exact, and slower.",
    broken(environment=Environment(device="gpu", gpus_per_node=8)),
    severity="warning",
)
def packages_for_gpus(c: Context) -> Iterator[Finding]:
    environment, fp32 = c.environment, c.config.mixed_precision.fp32
    if environment.device != "gpu":
        return
    if environment.transformer_engine is None and has_te_layers(c.model, MINIMUM, on_gpu=True, fp32=fp32):
        message = "Transformer Engine is not installed: attention is our own, and the layers are megatron-core's"
        yield Finding(NAME.model.transformer_impl, message, how_to_install("gpu"), "=local (silences this warning)")
    packages = {"mamba-ssm": environment.mamba_ssm, "causal-conv1d": environment.causal_conv1d}
    missing = [name for name, version in packages.items() if version is None]
    if missing and "M" in c.model.parts and not fp32:
        names = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'}"
        message = f"{names} not installed: Mamba layers are computed by plain PyTorch"
        yield Finding(NAME.model.hybrid_layer_pattern, message, how_to_install("mamba"))
