"""PyTorch's flash attention on CPUs, and plain matmul attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_cp.attention.context import AttentionCall
from megatron_cp.attention.kernels.base import Gradients, Kernel, Result, equal_head_dims, pad_last
from megatron_cp.attention.kernels.launches import Launch
from megatron_cp.attention.tiles import Kind, Tile, TileSize


class CpuFlash(Kernel):
    """PyTorch's CPU flash attention, at full speed with few key/value heads."""

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        """Return the sizes of small causal tiles, in float32.

        The kernel reads keys in blocks of 512 and computes a whole block if the diagonal crosses it, so a large causal
        tile wastes a fifth of the time. Cut to 256 rows, most work runs as unmasked tiles. It is as fast in float32 as
        in half precision, so partial results are not rounded before they are merged. float64 is for verification: one
        call for a sequence gives the bits of PyTorch's own attention.
        """
        return TileSize(causal=0 if dtype == torch.float64 else 256, band=256)

    def backward_tiles(self, dtype: torch.dtype, call: AttentionCall) -> TileSize:
        """Return forward's tiles, with large bf16 tiles where that is faster.

        With AVX-512 the bf16 kernel is twice as fast as float32, and rounds its results: a sum of rounded parts is less
        accurate than one rounded result. So bf16 is used if a sequence is one tile, and with a causal mask after the
        first tokens: those see few others and have most of the gradient. The fp16 kernel is not used: it is 17 times
        slower.
        """
        size = self.forward_tiles(dtype)
        if dtype != torch.bfloat16 or call.mask.left is not None or not fast_bf16():
            return size
        if call.mask.right == 0:
            return replace(size, half_from=512)
        return replace(size, half_from=0) if call.layout.size == 1 else size

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttentionCall) -> Result:
        tile, dim_v = launch.tile, v.shape[-1]
        q, k, v = equal_head_dims(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.kind is Kind.CAUSAL, attn_mask=_band_mask(tile, q), scale=call.scale
        )
        return out[..., :dim_v], lse

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        tile, (dout, q, k, v, out) = launch.tile, parts
        dim_qk, dim_v = q.shape[-1], v.shape[-1]
        q, k, v = equal_head_dims(q, k, v)
        dout, out = pad_last(dout, v.shape[-1]), pad_last(out, v.shape[-1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, tile.kind is Kind.CAUSAL, attn_mask=_band_mask(tile, q), scale=call.scale
        )
        return dq[..., :dim_qk], dk[..., :dim_qk], dv[..., :dim_v]


@functools.cache
def fast_bf16() -> bool:
    """Return whether oneDNN computes bf16 matmuls, 10 times faster than PyTorch."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Matmul(Kernel):
    """Plain matmul attention in blocks of rows, for any device and dtype."""

    ROWS = 512

    def forward_tiles(self, dtype: torch.dtype) -> TileSize:
        return TileSize(causal=0, band=0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttentionCall) -> Result:
        tile = launch.tile
        outs, lses = [], []
        for row in range(0, tile.q_length, self.ROWS):
            scores = self._scores(q, k, tile, row, call.scale)
            lse = scores.logsumexp(-1)
            outs.append((scores - lse.unsqueeze(-1)).exp() @ v.unsqueeze(2))
            lses.append(lse)
        return torch.cat(outs, dim=3).flatten(1, 2), torch.cat(lses, dim=3).flatten(1, 2)

    def backward(self, parts: Sequence[Tensor], lse: Tensor, launch: Launch, call: AttentionCall) -> Gradients:
        tile, (dout, q, k, v, out) = launch.tile, parts
        kv_heads = k.shape[1]
        dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for row in range(0, tile.q_length, self.ROWS):
            at = slice(row, row + self.ROWS)
            do, o, queries, denominators = (x[:, :, at].unflatten(1, (kv_heads, -1)) for x in (dout, out, q, lse))
            probabilities = (self._scores(q, k, tile, row, call.scale) - denominators.unsqueeze(-1)).exp()
            delta = (do * o).sum(-1, keepdim=True)
            dscores = probabilities * (do @ v.unsqueeze(2).mT - delta) * call.scale
            dqs.append(dscores @ k.unsqueeze(2))
            dk += (dscores.mT @ queries).sum(2)
            dv += (probabilities.mT @ do).sum(2)
        return torch.cat(dqs, dim=3).flatten(1, 2), dk, dv

    def max_logits(self, q: Tensor, k: Tensor, tile: Tile, scale: float) -> Tensor:
        """Return each head's largest score within a tile, [heads].

        Queries are [b, h, rows, d]."""
        blocks = (self._scores(q, k, tile, row, scale) for row in range(0, tile.q_length, self.ROWS))
        return torch.stack([scores.amax((0, 3, 4)).flatten() for scores in blocks]).amax(0)

    def _scores(self, q: Tensor, k: Tensor, tile: Tile, row: int, scale: float) -> Tensor:
        """Return masked scores [b, kv_heads, heads per kv head, rows, s']."""
        queries = q[:, :, row : row + self.ROWS].unflatten(1, (k.shape[1], -1))
        scores = queries @ k.unsqueeze(2).mT * scale
        if tile.kind is Kind.FULL:
            return scores
        low, high = (None, 0) if tile.kind is Kind.CAUSAL else (tile.low, tile.high)
        shifted = (None if low is None else low + row), (None if high is None else high + row)
        return scores + _additive_band(scores.shape[-2], tile.k_length, *shifted, q.dtype, q.device)


def _band_mask(tile: Tile, q: Tensor) -> Tensor | None:
    if tile.kind is not Kind.BAND:
        return None
    return _kept_band(tile.q_length, tile.k_length, tile.low, tile.high, q.dtype, q.device)


def _additive_band(
    rows: int, columns: int, low: int | None, high: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return [rows, columns]: 0 where low <= column - row <= high, -inf elsewhere."""
    distance = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if low is not None:
        allowed &= distance >= low
    if high is not None:
        allowed &= distance <= high
    return torch.zeros(rows, columns, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)


_kept_band = functools.lru_cache(maxsize=64)(_additive_band)  # most small CPU tiles have the same masks
