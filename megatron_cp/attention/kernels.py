"""One tile's attention, forward and backward, with the log-sum-exp going out and coming in.

Everything else in this package is arithmetic on rows; here the work is done, by the best kernel PyTorch ships for the
device, wrapped in the guards that kernel needs. A kernel takes [b, h, s, d] views (key and value may have fewer heads)
and must hand out, or take in, the natural-log softmax denominator [b, h, s], so that results over different keys
can be merged and gradients taken tile by tile from the final output and denominator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_cp.attention.context import Problem
from megatron_cp.attention.merge import Gradient, OutputAccumulator
from megatron_cp.attention.tiles import Kind, Tile, TileSize

KeyValue = tuple[Tensor, Tensor]

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward_tiles(query: Tensor) -> TileSize:
    """How the forward kernel for ``query`` wants its work cut.

    PyTorch's CPU kernel visits keys in blocks of 512 and computes a whole block where the diagonal crosses it, so a
    large causal tile wastes a fifth of its time; cut to 256 rows, most of that work runs as unmasked tiles. It is as
    fast in float32 as in half precision, so partial results are never rounded before they are merged. float64 is for
    verification: one call for a sequence keeps it identical, bit for bit, to PyTorch's own attention.
    """
    return TileSize(causal=0 if query.dtype == torch.float64 else 256, band=256)


def backward_tiles(query: Tensor, problem: Problem) -> TileSize:
    """How the backward kernel for ``query`` wants its work cut.

    As forward, but bf16 runs twice as fast as float32 on large tiles and rounds what it returns. A sum of rounded parts
    is up to 1.4 times as far from the truth as one rounded result. So bf16 is used where a sequence is one tile, and
    under a causal mask behind the first tokens: those see few others, and with them lies most of the gradient. The
    kernel for fp16 is of no use, being 17 times slower.
    """
    size = forward_tiles(query)
    if query.dtype != torch.bfloat16 or problem.mask.left is not None:
        return size
    if problem.mask.right == 0:
        return replace(size, half_from=512)
    return replace(size, half_from=0) if problem.layout.size == 1 else size


def attend(query: Tensor, key_value: KeyValue, tiles: Iterable[Tile], scale: float, into: OutputAccumulator) -> None:
    """Attention of [s, b, h, d] queries over [s', b, h', d] keys and values within ``tiles``, merged ``into``."""
    q, k, v = (_full_precision(_heads_first(x)) for x in (query, *key_value))
    for tile in tiles:
        out, lse = _forward(q[:, :, tile.q_rows], k[:, :, tile.k_rows], v[:, :, tile.k_rows], tile, scale)
        into.add(tile.q_rows, out, lse)


def attend_backward(
    dout: Tensor,
    query: Tensor,
    key_value: KeyValue,
    out: Tensor,
    lse: Tensor,
    tiles: Sequence[Tile],
    scale: float,
    into: tuple[Gradient, Gradient, Gradient],
) -> None:
    """Add the tiles' gradients ``into`` those of query, key and value.

    ``out`` and ``lse`` are the final ones, over all keys: they make the tiles' gradients sum to the whole's.
    """
    tensors = [_heads_first(x) for x in (dout, query, *key_value, out)]
    if not any(tile.half for tile in tiles):
        tensors = [_full_precision(x) for x in tensors]
    do, q, k, v, o = tensors
    dquery, dkey, dvalue = into
    for tile in tiles:
        rows, columns = tile.q_rows, tile.k_rows
        parts = [do[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], o[:, :, rows]]
        if not tile.half:
            parts = [_full_precision(x) for x in parts]
        dq, dk, dv = _backward(*parts, lse[:, :, rows], tile, scale)
        dquery.add(rows, dq)
        dkey.add(columns, dk)
        dvalue.add(columns, dv)


def _forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    dim_v = v.shape[-1]
    q, k, v = _equal_head_dims(q, k, v)
    out, lse = _cpu_forward(q, k, v, 0.0, tile.kind is Kind.CAUSAL, attn_mask=_band_mask(tile, q), scale=scale)
    return out[..., :dim_v], lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dim_qk, dim_v = q.shape[-1], v.shape[-1]
    q, k, v = _equal_head_dims(q, k, v)
    dout, out = _pad_last(dout, v.shape[-1]), _pad_last(out, v.shape[-1])
    dq, dk, dv = _cpu_backward(
        dout, q, k, v, out, lse, 0.0, tile.kind is Kind.CAUSAL, attn_mask=_band_mask(tile, q), scale=scale
    )
    return dq[..., :dim_qk], dk[..., :dim_qk], dv[..., :dim_v]


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, h, d] as [b, h, s, d]. The CPU kernel reads a strided last dim as if it were packed, so it must be."""
    return (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()).permute(1, 2, 0, 3)


def _full_precision(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _equal_head_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels take one head dim: zero columns change neither scores nor the real columns of the output."""
    dim = max(q.shape[-1], v.shape[-1])
    return _pad_last(q, dim), _pad_last(k, dim), _pad_last(v, dim)


def _pad_last(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def _band_mask(tile: Tile, q: Tensor) -> Tensor | None:
    if tile.kind is not Kind.BAND:
        return None
    return _additive_band(tile.q_length, tile.k_length, tile.low, tile.high, q.dtype, q.device)


@functools.lru_cache(maxsize=64)
def _additive_band(
    rows: int, columns: int, low: int | None, high: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[rows, columns] with 0 where low <= column - row <= high and -inf elsewhere."""
    distance = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if low is not None:
        allowed &= distance >= low
    if high is not None:
        allowed &= distance <= high
    return torch.zeros(rows, columns, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)
