"""Where a job runs, as far as memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """te_layers: Transformer Engine's layers, attention and loss; else megatron-core's local layers and our attention.

    context: bytes of CUDA, its libraries and NCCL outside of PyTorch's allocator. waste: share of activations,
    gradients of activations and buffers that the allocator holds and cannot use. flash_attention: no kernel keeps the
    scores; false for what was published before there was one.
    """

    te_layers: bool
    context: float = 0.0
    waste: float = 0.0
    flash_attention: bool = True


CPU = Platform(te_layers=False)
GPU = Platform(te_layers=True, context=1.0 * 2**30, waste=0.04)
