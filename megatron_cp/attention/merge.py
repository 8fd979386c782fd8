"""Merge partial attention results by log-sum-exp, in float32 or float64.

Let out_i be the attention over key set i, and lse_i the natural log of its softmax denominator. The attention over the
union has ``lse = logaddexp(lse_1, lse_2)`` and ``out = out_1 + (out_2 - out_1) * sigmoid(lse_2 - lse_1)``
(the online softmax of FlashAttention, Dao et al. 2022, across blocks instead of within one).
"""

import torch
from torch import Tensor

Rows = slice | Tensor  # consecutive rows, or an int64 index without repetition


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class OutputAccumulator:
    """Output [s, b, h, d] and log-sum-exp [b, h, s] of queries, summed block by block.

    Rows without any key keep output 0 and log-sum-exp -inf.
    """

    def __init__(self, query: Tensor, value_dim: int) -> None:
        self._query = query
        self._value_dim = value_dim
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._end = 0  # rows from here on have no keys yet

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Merge one block's ``out`` [b, h, rows, d] and finite ``lse`` [b, h, rows].

        The first block keeps the kernel's dtype, and is used without a copy if it has all rows.
        """
        s, b, h, _ = self._query.shape
        start, end = (rows.start, rows.stop) if isinstance(rows, slice) else (0, s)
        untouched, self._end = start >= self._end, max(end, self._end)
        if self._out is None or self._lse is None:
            if out.shape[2] == s and isinstance(rows, slice):
                self._out, self._lse = out, lse
                return
            self._out = out.new_zeros((s, b, h, self._value_dim)).permute(1, 2, 0, 3)
            self._lse = lse.new_full((b, s, h), -torch.inf).transpose(1, 2)
        if untouched and out.dtype == self._out.dtype:
            put(self._out, rows, out)
            put(self._lse, rows, lse)
            return
        dtype = accumulation_dtype(self._query.dtype)
        self._out = self._out.to(dtype)
        merged, merged_lse = take(self._out, rows), take(self._lse, rows)
        merge_(merged, merged_lse, out.to(dtype), lse)
        if isinstance(rows, Tensor):
            put(self._out, rows, merged)
            put(self._lse, rows, merged_lse)

    def finish(self, softmax_offset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output in the query's dtype, contiguous, and its log-sum-exp.

        ``softmax_offset`` [h] is included: one more key with that score and value zero, which only takes probability.
        """
        s, b, h, _ = self._query.shape
        if self._out is None or self._lse is None:
            dtype = accumulation_dtype(self._query.dtype)
            out = self._query.new_zeros((s, b, h, self._value_dim))
            return out, self._query.new_full((b, h, s), -torch.inf, dtype=dtype)
        out, lse = self._out, self._lse
        if softmax_offset is not None:
            total = torch.logaddexp(lse, softmax_offset.to(lse.dtype)[:, None])
            out = out.to(lse.dtype) * (lse - total).exp().unsqueeze(-1)
            lse = total
        return out.permute(2, 0, 1, 3).to(self._query.dtype).contiguous(), lse


class Gradient:
    """Gradient of one [s, b, h, d] tensor, summed in the accumulation dtype."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add(self, rows: Rows, part: Tensor) -> None:
        """Add ``part`` [b, h, rows, d], a fresh tensor.

        The first part keeps the kernel's dtype, and is used without a copy if it has all rows.
        """
        s, b, h, d = self._like.shape
        if self._sum is None:
            self._sum = part
            if part.shape[2] != s or not isinstance(rows, slice):
                self._sum = part.new_zeros((s, b, h, d)).permute(1, 2, 0, 3)
                put(self._sum, rows, part)
            return
        self._sum = self._sum.to(accumulation_dtype(self._like.dtype))
        if isinstance(rows, slice):
            self._sum[:, :, rows].add_(part)
        else:
            put(self._sum, rows, take(self._sum, rows) + part)

    def add_all(self, others: Tensor) -> None:
        """Add another rank's sum [s, b, h, d], whose memory may be kept."""
        part = others.permute(1, 2, 0, 3)
        self._sum = part if self._sum is None else self._sum.to(part.dtype).add_(part)

    def total(self) -> Tensor:
        """Return [s, b, h, d] in the accumulation dtype, contiguous."""
        return self._whole(accumulation_dtype(self._like.dtype))

    def finish(self) -> Tensor:
        """Return [s, b, h, d] in the tensor's own dtype, contiguous."""
        return self._whole(self._like.dtype)

    def _whole(self, dtype: torch.dtype) -> Tensor:
        if self._sum is None:
            return self._like.new_zeros(self._like.shape, dtype=dtype)
        return self._sum.permute(2, 0, 1, 3).to(dtype).contiguous()


def take(x: Tensor, rows: Rows) -> Tensor:
    """Select rows of [b, h, s, ...]: a view of consecutive rows, else a copy.

    In the copy a row's heads are neighbours.
    """
    return x[:, :, rows] if isinstance(rows, slice) else x.movedim(2, 0).index_select(0, rows).movedim(0, 2)


def put(x: Tensor, rows: Rows, values: Tensor) -> None:
    """Write ``values`` to rows of ``x`` [b, h, s, ...]."""
    if isinstance(rows, slice):
        x[:, :, rows] = values
    else:
        x.movedim(2, 0).index_copy_(0, rows, values.movedim(2, 0))


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge ``new_out`` [..., d] and finite ``new_lse`` [...] in place."""
    out.lerp_(new_out, torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def softmax_offset_grad(
    softmax_offset: Tensor | None, out: Tensor, dout: Tensor, lse: Tensor, rows: list[slice]
) -> Tensor | None:
    """Return the offset's gradient [h].

    Computed from the final ``out``, ``dout`` [s, b, h, d] and ``lse`` [b, h, s], offset included. The offset's
    probability is ``p = exp(offset - lse)`` and its value is zero, so the softmax backward gives ``-sum p * <dout,
    out>``. Only the real tokens in ``rows`` count: padding may hold any values.
    """
    if softmax_offset is None:
        return None
    grad = torch.zeros_like(softmax_offset, dtype=torch.float64)
    for part in rows:
        delta = (dout[part].to(lse.dtype) * out[part].to(lse.dtype)).sum(-1).permute(1, 2, 0)
        grad -= ((softmax_offset.to(lse.dtype)[:, None] - lse[:, :, part]).exp() * delta).sum(
            (0, 2), dtype=torch.float64
        )
    return grad.to(softmax_offset.dtype)
