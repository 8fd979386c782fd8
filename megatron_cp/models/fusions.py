"""Select Transformer Engine's kernels beside layers and attention. Pure.

Plain PyTorch reads and writes whole activations several times for a rotary embedding or cross-entropy, and writes a
gradient before it adds it to the float32 sum. Each of these kernels makes one pass. A grouped product replaces
hundreds of small ones of a rank's experts.
"""

from __future__ import annotations

from typing import Literal

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.yarn import concentration


def rotary_gap(model: ModelConfig) -> str | None:
    """Return why a model cannot use the fused rotary embedding; None if it can."""
    if model.packed_placement != "zigzag":
        return f"not supported with {NAME.model.packed_placement}={model.packed_placement}"
    if model.multi_latent_attention:
        return "with latent attention it supports YaRN only, and slices a table of the original length"
    if model.position_embedding_type == "yarn":
        factor = concentration(model)
        return None if factor == 1 else f"it omits YaRN's concentration factor ({factor:.4g})"
    if model.position_embedding_type != "rope":
        return f"not supported with {NAME.model.position_embedding_type}={model.position_embedding_type}"
    return None


def fuses_rotary_embedding(model: ModelConfig, te_layers: bool) -> bool:
    """Return whether one kernel rotates queries, and one keys."""
    wanted = model.apply_rope_fusion
    return te_layers and rotary_gap(model) is None if wanted is None else wanted


def fuses_gradient_sum(model: ModelConfig, te_layers: bool) -> bool:
    """Return whether weight gradients are summed inside matrix products."""
    wanted = model.gradient_accumulation_fusion
    return te_layers if wanted is None else wanted


def fuses_gate(model: ModelConfig) -> bool:
    """Return whether one function can compute activation and gate: plain SwiGLU."""
    altered = bool(model.glu_linear_offset) or model.activation_func_clamp_value is not None
    return model.activation_func == "silu" and model.gated_linear_unit and not altered


def groups_experts(model: ModelConfig, te_layers: bool) -> bool:
    """Return whether a rank's experts share one grouped product."""
    wanted = model.moe_grouped_gemm
    return "E" in model.layer_letters and (te_layers if wanted is None else wanted)


def fused_loss(model: ModelConfig, te_layers: bool) -> Literal["native", "te"] | None:
    """Return which kernel computes the cross-entropy; None: plain PyTorch."""
    whose = model.cross_entropy_fusion_impl or ("te" if te_layers else "native")
    wanted = model.cross_entropy_loss_fusion
    if wanted is None:
        wanted = whose == "te" and te_layers and not model.deterministic_mode
    return whose if wanted else None


def kernels_in_use(model: ModelConfig, te_layers: bool) -> list[str]:
    """List, in words, the Transformer Engine kernels that a model uses."""
    used = {
        "rotary embedding": fuses_rotary_embedding(model, te_layers),
        "weight gradient sums": fuses_gradient_sum(model, te_layers),
        "cross-entropy": fused_loss(model, te_layers) == "te",
        "grouped experts": groups_experts(model, te_layers),
    }
    return [name for name, is_used in used.items() if is_used]
