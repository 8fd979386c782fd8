"""Mamba-2's sequence mixing in PyTorch, for any device.

The recurrence of each head, with a state of [head_dim, state_dim] that is zero before a sequence's first token:

    state_t = exp(dt_t * A) * state_{t-1} + dt_t * x_t B_t^T        y_t = state_t C_t + D x_t

Computed as in "Transformers are SSMs" (Dao and Gu 2024, section 6 and listing 1): tokens of a chunk interact through a
lower triangular matrix, in parallel over chunks, and only the states at the ends of chunks are carried on in order.
Inside, everything is float32 (float64 for float64 inputs).

In packs, sequences follow each other, and ``seq_idx`` numbers the sequence of each token. Neither convolution nor state
crosses from one sequence to the next.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_cp.attention.merge import accumulation_dtype

# Work inside a chunk grows with its length, the number of carried states falls: 64 is fastest on CPUs.
CHUNK_SIZE = 64


def conv_and_scan(
    zxbcdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    d: Tensor,
    *,
    head_dim: int,
    groups: int,
    seq_idx: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Compute convolution, scan and gate between a mixer's projections.

    Args:
        zxbcdt: [b, l, 2 * inner + 2 * groups * state_dim + heads], the projections z, x, B, C, dt, with
            inner = heads * head_dim.
        conv_weight, conv_bias: [inner + 2 * groups * state_dim, width] and [inner + 2 * groups * state_dim]; x, B and C
            are convolved.
        dt_bias, a, d: [heads]; a is negative.
        seq_idx: int [b, l], the sequence of each token in a pack.

    Returns [b, l, inner] in the dtype of ``zxbcdt``.
    """
    heads = a.shape[0]
    inner = heads * head_dim
    convolved = conv_weight.shape[0]
    state_dim = (convolved - inner) // (2 * groups)
    dtype = accumulation_dtype(zxbcdt.dtype)
    z, xbc, dt = zxbcdt.to(dtype).split([inner, convolved, heads], dim=-1)
    xbc = F.silu(causal_conv(xbc, conv_weight.to(dtype), conv_bias.to(dtype), seq_idx))
    x, b, c = xbc.split([inner, groups * state_dim, groups * state_dim], dim=-1)
    x = x.unflatten(-1, (heads, head_dim))
    b, c = (t.unflatten(-1, (groups, state_dim)) for t in (b, c))
    dt = F.softplus(dt + dt_bias.to(dtype))
    y = ssd_scan(x, dt, a.to(dtype), b, c, seq_idx=seq_idx, chunk_size=chunk_size) + x * d.to(dtype)[:, None]
    return (y.flatten(-2) * F.silu(z)).to(zxbcdt.dtype)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """Compute each channel's causal convolution within its sequence.

    ``x`` [b, l, channels], ``weight`` [channels, width] (the last column is the token's own), ``bias`` [channels].
    """
    length, width = x.shape[1], weight.shape[1]
    out = bias + x * weight[:, -1]
    for back in range(1, min(width, length)):
        earlier = x[:, :-back]
        if seq_idx is not None:
            another = seq_idx[:, back:] != seq_idx[:, :-back]
            earlier = earlier.masked_fill(another[..., None], 0)
        out = out + F.pad(earlier, (0, 0, back, 0)) * weight[:, -1 - back]
    return out


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    seq_idx: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Compute the recurrence without its skip D: y [batch, l, heads, head_dim].

    ``x`` [batch, l, heads, head_dim], ``dt`` [batch, l, heads] positive, ``a`` [heads] negative, ``b`` and ``c``
    [batch, l, groups, state_dim], where heads/groups neighbouring heads share a group; all float32 or all float64.
    """
    length, heads = x.shape[1:3]
    groups = b.shape[2]
    size = min(chunk_size, length)
    padding = -length % size  # zeros: they add nothing to a state and come last
    if padding:
        x, b, c = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, b, c))
        dt = F.pad(dt, (0, 0, 0, padding))
        seq_idx = None if seq_idx is None else F.pad(seq_idx, (0, padding), value=-1)
    # From here on [batch, chunk, group, head of the group, token of the chunk, ...].
    by_group, by_chunk = (groups, heads // groups), (-1, size)
    x = (x * dt[..., None]).unflatten(2, by_group).unflatten(1, by_chunk).permute(0, 1, 3, 4, 2, 5)
    b, c = (t.unflatten(1, by_chunk).transpose(2, 3).unsqueeze(3) for t in (b, c))
    steps = (dt * a).unflatten(2, by_group).unflatten(1, by_chunk).permute(0, 1, 3, 4, 2)
    # Exponents are summed in float64: sums grow over a chunk, and small differences of them matter.
    decay = steps.double().cumsum(-1)
    seq = None if seq_idx is None else seq_idx.unflatten(1, by_chunk)[:, :, None, None]

    y = (c @ b.mT) * _within_chunks(decay, seq, x.dtype) @ x
    if x.shape[1] > 1:
        carry = decay.to(x.dtype).exp()
        if seq is not None:
            carry = carry * (seq == _previous_last(seq))
        y = y + (c @ _states_before(x, b, decay, seq).mT) * carry[..., None]
    return y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :length]


def _within_chunks(decay: Tensor, seq: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return decay [..., i, j] from token j to i; 0 for j > i or another sequence."""
    size = decay.shape[-1]
    visible = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril()
    if seq is not None:
        visible = visible & (seq[..., :, None] == seq[..., None, :])
    exponent = (decay[..., :, None] - decay[..., None, :]).to(dtype)
    # Before the exponential: an overflow above the diagonal would make gradients nan.
    return exponent.masked_fill(~visible, -torch.inf).exp()


def _states_before(x: Tensor, b: Tensor, decay: Tensor, seq: Tensor | None) -> Tensor:
    """Return each chunk's initial state.

    Shape: [batch, chunk, group, head of the group, head_dim, state_dim].
    """
    to_end = (decay[..., -1:] - decay).to(x.dtype).exp()
    whole = decay[..., -1].to(x.dtype).exp()
    if seq is not None:
        to_end = to_end * (seq == seq[..., -1:])
        whole = whole * (seq[..., -1:] == _previous_last(seq))[..., 0]
    added = (x * to_end[..., None]).mT @ b
    state = torch.zeros_like(added[:, 0])
    states = [state]
    for chunk in range(added.shape[1] - 1):
        state = torch.addcmul(added[:, chunk], whole[:, chunk, ..., None, None], state)
        states.append(state)
    return torch.stack(states, dim=1)


def _previous_last(seq: Tensor) -> Tensor:
    """Return the sequence before each chunk (of the first chunk: its own)."""
    return torch.cat([seq[:, :1, ..., :1], seq[:, :-1, ..., -1:]], dim=1)
