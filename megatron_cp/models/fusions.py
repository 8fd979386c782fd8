"""Kernels of Transformer Engine beside its layers and its attention: which of them a model uses. Pure: no torch.

Plain PyTorch reads and writes whole activations several times for a rotary embedding or a cross-entropy, and writes a
matrix's gradient before it is added to the float32 sum; each of these kernels does its work in one pass. One call for
all experts of a rank replaces hundreds of small ones.
"""

from __future__ import annotations

from typing import Literal

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.yarn import concentration


def rotary_gap(model: ModelConfig) -> str | None:
    """Why a model cannot have the fused rotary embedding; None if it can."""
    if model.multi_latent_attention:
        return "latent attention's is for YaRN only, and slices a table of the original length instead of its own"
    if model.position_embedding_type == "yarn":
        factor = concentration(model)
        return None if factor == 1 else f"it leaves out YaRN's concentration factor, {factor:.4g} here"
    if model.position_embedding_type != "rope":
        return f"there is none with {NAME.model.position_embedding_type}={model.position_embedding_type}"
    return None


def fuses_rotary_embedding(model: ModelConfig, te_layers: bool) -> bool:
    """Whether queries and keys are rotated by one kernel each, where the layers are Transformer Engine's or not."""
    wanted = model.apply_rope_fusion
    return te_layers and rotary_gap(model) is None if wanted is None else wanted


def fuses_gradient_sum(model: ModelConfig, te_layers: bool) -> bool:
    """Whether the products that make the weights' gradients add them to the sum over microbatches themselves."""
    wanted = model.gradient_accumulation_fusion
    return te_layers if wanted is None else wanted


def groups_experts(model: ModelConfig, te_layers: bool) -> bool:
    """Whether the experts of a rank share a product, instead of one each."""
    wanted = model.moe_grouped_gemm
    return "E" in model.layer_letters and (te_layers if wanted is None else wanted)


def fused_loss(model: ModelConfig, te_layers: bool) -> Literal["native", "te"] | None:
    """Whose kernel computes the cross-entropy: megatron-core's, Transformer Engine's, or (None) plain PyTorch."""
    whose = model.cross_entropy_fusion_impl or ("te" if te_layers else "native")
    wanted = model.cross_entropy_loss_fusion
    if wanted is None:
        wanted = whose == "te" and te_layers and not model.deterministic_mode
    return whose if wanted else None


def kernels_in_use(model: ModelConfig, te_layers: bool) -> list[str]:
    """Those of Transformer Engine that a model uses, in words."""
    used = {
        "rotary embedding": fuses_rotary_embedding(model, te_layers),
        "sums of weight gradients": fuses_gradient_sum(model, te_layers),
        "cross-entropy": fused_loss(model, te_layers) == "te",
        "products of experts": groups_experts(model, te_layers),
    }
    return [name for name, is_used in used.items() if is_used]
