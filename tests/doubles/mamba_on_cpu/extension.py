"""Compute and refuse in PyTorch what ``causal_conv1d_cuda`` does (1.7.0).

The signatures are the real ones. Everything is computed in float32, as there, and written to the given tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor | None,
    initial_states: None,
    out: Tensor,
    final_states_out: None,
    silu_activation: bool,
) -> None:
    assert initial_states is None and final_states_out is None and silu_activation
    _check(x, weight, bias, seq_idx, out)
    out.copy_(F.silu(_convolved(x, weight, bias, seq_idx)))


def causal_conv1d_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: None,
    dfinal_states: None,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    dinitial_states: None,
    silu_activation: bool,
) -> None:
    assert initial_states is None and dfinal_states is None and dinitial_states is None and silu_activation
    _check(x, weight, bias, seq_idx, dout, dx)
    convolved = _convolved(x, weight, bias, seq_idx)
    gate = convolved.sigmoid()
    gradient = dout.float() * gate * (1 + convolved * (1 - gate))
    total = torch.zeros_like(gradient)
    for column, back, earlier, same in _columns(x, weight, seq_idx):
        dweight[:, column] += (gradient * earlier).sum((0, 2))
        total += F.pad(gradient * same * weight[:, column, None].float(), (0, back))[..., back:]
    dbias += gradient.sum((0, 2))
    dx.copy_(total)


def _columns(x: Tensor, weight: Tensor, seq_idx: Tensor | None) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield each column of the weight with its tokens.

    The distance of the tokens, the tokens, and whether they are in the sequence.
    """
    length, width = x.shape[-1], weight.shape[1]
    numbers = seq_idx if seq_idx is not None else x.new_zeros(1, length, dtype=torch.int32)
    for column in range(width):
        back = width - 1 - column
        same = (F.pad(numbers, (back, 0), value=-1)[:, :length] == numbers)[:, None]
        yield column, back, F.pad(x.float(), (back, 0))[..., :length] * same, same


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None) -> Tensor:
    columns = _columns(x, weight, seq_idx)
    return bias.float()[:, None] + sum(earlier * weight[:, column, None].float() for column, _, earlier, _ in columns)


def _check(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None, *others: Tensor) -> None:
    batch, channels, length = x.shape
    _require(x.dtype in DTYPES and weight.dtype in DTYPES and bias.dtype == weight.dtype, "dtypes")
    _require(weight.shape == (channels, weight.shape[1]) and bias.shape == (channels,), "shapes")
    _require(2 <= weight.shape[1] <= 4 and bias.stride(0) == 1, "width")
    last = x.stride(1) == 1 and x.stride(2) > 1
    _require(last or x.stride(2) == 1, "one dim of x is contiguous")
    if seq_idx is not None:
        _require(last, "seq_idx wants channels last")
        _require(seq_idx.dtype == torch.int32 and seq_idx.is_contiguous(), "seq_idx is int32 and contiguous")
        _require(seq_idx.shape == (batch, length), "seq_idx is [b, s]")
    for tensor in (x, *others):
        _require(tensor.dtype == x.dtype and tensor.shape == x.shape, "the others are as x")
        if last:
            _require(channels % 8 == 0 and tensor.stride(1) == 1, "channels last, eights of them")
            _require(tensor.stride(2) % 8 == 0 and tensor.stride(0) % 8 == 0, "strides of eights")
            # The extension does not check this. A GPU reads 16 bytes at a time, and fails at other addresses.
            _require(tensor.data_ptr() % 16 == 0, "alignment")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"causal_conv1d: {what}")
