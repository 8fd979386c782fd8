"""Platform properties of the memory model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_cp.config.model_config import ModelConfig


@dataclass(frozen=True)
class Platform:
    """A platform: layer implementation and allocator overhead.

    te_layers: use Transformer Engine's layers, attention and loss. If false, use megatron-core's local layers and this
        project's attention.
    context: bytes of the CUDA context, libraries and NCCL outside PyTorch's allocator.
    waste: allocator fragmentation, as a fraction of activations, activation gradients and buffers.
    fused_gated_norm: Mamba layers use mamba-ssm's gated norm, which keeps its 16-bit input. False: this project's.
    offloads: host memory is another one than the device's.
    flash_attention: attention does not store scores. False for figures published before flash attention.
    """

    te_layers: bool
    context: float = 0.0
    waste: float = 0.0
    fused_gated_norm: bool = False
    flash_attention: bool = True
    offloads: bool = True


CPU = Platform(te_layers=False, offloads=False)
GPU = Platform(te_layers=True, context=1.0 * 2**30, waste=0.04)
GPU_WITH_LOCAL_LAYERS = replace(GPU, te_layers=False)


def gpu_of(model: ModelConfig) -> Platform:
    """Return a GPU with the layers that a model asks for.

    megatron-core's local layers are counted as on a CPU, where more of them stays: fused kernels may need less.
    """
    return GPU_WITH_LOCAL_LAYERS if model.transformer_impl == "local" else GPU
