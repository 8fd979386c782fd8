"""Recomputation and fused kernels"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import LAYOUT, setting, size


@dataclass
class Memory:
    memory_savings: Literal["off", "auto"] = setting(
        "off",
        "auto: if the settings do not fit the GPU's memory by the estimate, the fastest combination of recomputation, "
        "chunked losses, tiled MLPs, offload and groups of heads that does",
        LAYOUT,
    )
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None, "full: recompute whole layers in the backward pass; selective: only recompute_modules", LAYOUT
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, "with full: checkpoint every n layers (uniform) or recompute the first n (block)", LAYOUT
    )
    recompute_num_layers: int | None = setting(None, "with full: the number n of layers", LAYOUT)
    recompute_modules: list[str] | None = setting(None, "with selective: modules to recompute", LAYOUT)
    distribute_saved_activations: bool = setting(
        False, "divide the activations that full recomputation saves over tp ranks", LAYOUT
    )
    offload_layer_inputs: bool = setting(
        False,
        "with full: keep the input of each recomputed layer in pinned host memory until its backward pass; on a CPU "
        "only count its bytes",
        LAYOUT,
    )
    cpu_offloading: bool = setting(
        False,
        "offload activations to host memory; refused by rule K28 (no offloading): use offload_layer_inputs",
    )
    apply_rope_fusion: bool | None = setting(
        None,
        "fused rotary embedding; null: with Transformer Engine's layers, if the kernel fits the model",
        LAYOUT,
        translated=True,
    )
    gradient_accumulation_fusion: bool | None = setting(
        None,
        "accumulate weight gradients in the matrix product; null: with Transformer Engine's layers, if possible",
        LAYOUT,
        translated=True,
    )
    cross_entropy_loss_fusion: bool | None = setting(
        None,
        "fused cross-entropy; null: with Transformer Engine's layers, if the kernel fits the model",
        LAYOUT,
        translated=True,
    )
    cross_entropy_fusion_impl: Literal["native", "te"] | None = setting(
        None,
        "kernel: te (Transformer Engine) or native (megatron-core); null: automatic",
        LAYOUT,
        translated=True,
    )
    cross_entropy_chunk_size: int | None = size(
        None, "tokens per rank whose logits exist at one time; null: all", LAYOUT
    )
    mlp_chunk_size: int | None = size(
        None, "tokens per rank whose MLP intermediates exist at one time; null: all", LAYOUT
    )
    mlp_chunks_for_training: int = size(1, "chunks of the sequence that an MLP computes one by one", LAYOUT)
    attention_head_groups: int = size(1, "groups of heads that attention projects and computes one by one", LAYOUT)
    overlap_head_groups: bool = setting(
        False, "exchange a group of heads with other ranks while the group before it is computed", LAYOUT
    )
    calculate_per_token_loss: bool = setting(True, "sum the loss and divide once by the number of unmasked tokens")
    deterministic_mode: bool = setting(False, "use deterministic kernels", LAYOUT)
