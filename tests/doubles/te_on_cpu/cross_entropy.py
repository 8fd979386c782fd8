"""Replace Transformer Engine's Triton kernels of the cross-entropy.

Arguments, strides and results are the same. Triton's interpreter can run the real kernels, but too slowly for whole
models and not in bf16. ``layers.py`` compares both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Kernel:
    """Kernel called as ``kernel[(rows,)](...)``, one row of logits per program."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return functools.partial(self._function, grid[0])


def _online_softmax(
    rows: int, *, X_ptr: Tensor, X_stride: int, Y_ptr: Tensor, Y_stride: int, m_d_X_y_ptr: Tensor, rank: int,
    n_cols: int, **launch: Any,
) -> None:  # fmt: skip
    """Return each row's maximum, sum of exponentials and label's logit.

    The logit is there if the label is on this rank.
    """
    x = X_ptr.as_strided((rows, n_cols), (X_stride, 1)).float()
    column, here = _column(Y_ptr, Y_stride, rows, rank, n_cols)
    top = x.max(-1).values
    total = (x - top[:, None]).exp().sum(-1)
    label = x.gather(1, column)[:, 0].masked_fill(~here, -torch.inf)
    m_d_X_y_ptr.view(rows, 3).copy_(torch.stack((top, total, label), -1))


def _cross_entropy(
    rows: int, *, X_ptr: Tensor, X_stride: int, Y_ptr: Tensor, Y_stride: int, loss_ptr: Tensor, m_d_X_y_ptr: Tensor,
    rank: int, world_size: int, n_cols: int, reduce_loss: bool, label_smoothing: float, **launch: Any,
) -> None:  # fmt: skip
    """Compute the losses, and replace the logits by their gradients."""
    assert not reduce_loss and not label_smoothing
    tops, totals, labels = m_d_X_y_ptr.view(world_size, rows, 3).unbind(-1)
    top = tops.max(0).values
    total = (totals * (tops - top).exp()).sum(0)
    loss_ptr.copy_(top + total.log() - labels.max(0).values)
    x = X_ptr.as_strided((rows, n_cols), (X_stride, 1))
    column, here = _column(Y_ptr, Y_stride, rows, rank, n_cols)
    x.copy_((x.float() - top[:, None]).exp() / total[:, None])
    x.scatter_add_(1, column, -here[:, None].to(x.dtype))


def _element_mul(
    rows: int, X_ptr: Tensor, X_stride: int, grad: Tensor, grad_stride: int, n_cols: int, **launch: Any
) -> None:
    x = X_ptr.as_strided((rows, n_cols), (X_stride, 1))
    x.copy_(x * grad.as_strided((rows, 1), (grad_stride, 1)))


def _column(labels: Tensor, stride: int, rows: int, rank: int, n_cols: int) -> tuple[Tensor, Tensor]:
    """Return the label's column in this rank's part of a row, [rows, 1].

    Also whether it is there, [rows].
    """
    column = labels.as_strided((rows,), (stride,)) - rank * n_cols
    return column.clamp(0, n_cols - 1)[:, None], (column >= 0) & (column < n_cols)


KERNELS = {
    "online_softmax_kernel": Kernel(_online_softmax),
    "cross_entropy_kernel": Kernel(_cross_entropy),
    "element_mul_kernel": Kernel(_element_mul),
}
