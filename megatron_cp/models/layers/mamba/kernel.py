"""Convolution and scan of a Mamba-2 layer, by mamba-ssm's kernel where possible."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.models.layers.mamba.exchange import repeat_groups, share_of_channels, share_of_projections
from megatron_cp.models.layers.mamba.shape import MambaShape, MambaShare
from megatron_cp.models.layers.mamba.ssd import conv_and_scan

try:  # mamba-ssm's fused kernel requires this module of causal-conv1d
    import causal_conv1d.cpp_functions  # noqa: F401
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined as fused_kernel
except ImportError:
    fused_kernel = None

Weights = tuple[Tensor, ...]  # of the convolution [channels, width] and [channels], dt_bias, a, d [heads]

FUSED_CHUNK_SIZE = 128
# Its Triton kernels index elements with 32 bits, and read wrong memory beyond, mostly without an error.
FUSED_ELEMENTS = 2**31


def conv_and_scan_best(x: Tensor, weights: Weights, shape: MambaShape, seq_idx: Tensor | None) -> Tensor:
    """Compute :func:`conv_and_scan`, by mamba-ssm's kernel where possible."""
    too_large = _largest_tensor(x, shape) >= FUSED_ELEMENTS
    if fused_kernel is None or not prefers_fused_kernel(x) or not _aligned(shape) or (too_large and shape.heads == 1):
        return conv_and_scan(x, *weights, head_dim=shape.head_dim, groups=shape.groups, seq_idx=seq_idx)
    if too_large:
        halves = [shape.share(index, 2) for index in range(2)]
        parts = [
            conv_and_scan_best(
                repeat_groups(share_of_projections(x, shape, half), half),
                share_of_weights(weights, shape, half),
                half.scanned,
                seq_idx,
            )
            for half in halves
        ]
        return torch.cat(parts, dim=-1)
    return fused_kernel(
        x.contiguous(),
        *weights,
        chunk_size=FUSED_CHUNK_SIZE,
        seq_idx=None if seq_idx is None else seq_idx.contiguous(),
        activation="silu",
        headdim=shape.head_dim,
        ngroups=shape.groups,
        norm_before_gate=False,
    )


def share_of_weights(weights: Weights, shape: MambaShape, share: MambaShare) -> Weights:
    convolution, of_heads = weights[:2], weights[2:]
    heads = slice(share.heads.start, share.heads.stop)
    return (
        *(share_of_channels(weight, shape, share) for weight in convolution),
        *(weight[heads] for weight in of_heads),
    )


def prefers_fused_kernel(x: Tensor) -> bool:
    """Return whether mamba-ssm's kernel should be used: its float32 products are TF32."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _aligned(shape: MambaShape) -> bool:
    """Return whether x, B and C are aligned to 8 channels, as causal-conv1d requires."""
    return shape.inner % 8 == 0 and sum(shape.convolved) % 8 == 0


def _largest_tensor(x: Tensor, shape: MambaShape) -> int:
    """Return the largest number of elements of a tensor in the scan."""
    states = -(-shape.inner * shape.state_dim // FUSED_CHUNK_SIZE)
    return x.shape[:2].numel() * max(x.shape[-1], states, shape.groups * FUSED_CHUNK_SIZE)
