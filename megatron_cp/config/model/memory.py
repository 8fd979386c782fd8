"""Recomputation and fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import LAYOUT, setting, size


@dataclass
class Memory:
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None, "full: whole layers are computed again backward; selective: recompute_modules of them", LAYOUT
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, "of full: every so many layers, or the first so many", LAYOUT
    )
    recompute_num_layers: int | None = setting(None, "of full: so many layers", LAYOUT)
    recompute_modules: list[str] | None = setting(None, "of selective: what is computed again", LAYOUT)
    distribute_saved_activations: bool = setting(False, "tp ranks divide what full recomputation keeps", LAYOUT)
    cpu_offloading: bool = setting(False, "of activations; refused by rule K28 (no offloading)")
    apply_rope_fusion: bool | None = setting(
        None,
        "one kernel rotates; null: where the layers are Transformer Engine's and it fits the model",
        LAYOUT,
        translated=True,
    )
    gradient_accumulation_fusion: bool | None = setting(
        None,
        "the matrix product itself accumulates weight gradients; null: with Transformer Engine's layers, where it fits",
        LAYOUT,
        translated=True,
    )
    cross_entropy_loss_fusion: bool | None = setting(
        None,
        "one kernel computes the loss; null: where the layers are Transformer Engine's and the kernel fits the model",
        LAYOUT,
        translated=True,
    )
    cross_entropy_fusion_impl: Literal["native", "te"] | None = setting(
        None,
        "whose fused loss: Transformer Engine's (te) or megatron-core's (native); null: chosen with the kernel",
        LAYOUT,
        translated=True,
    )
    cross_entropy_chunk_size: int | None = size(
        None, "tokens whose logits exist at once on a rank; null: all of them", LAYOUT
    )
    mlp_chunks_for_training: int = size(1, "pieces of a sequence that an MLP computes one after the other", LAYOUT)
    calculate_per_token_loss: bool = setting(True, "the loss is a sum, divided once by all tokens that count")
    deterministic_mode: bool = setting(False, "kernels whose results are the same each time", LAYOUT)
