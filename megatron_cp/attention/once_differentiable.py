"""Backward passes without derivatives of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Decorate a backward whose gradients cannot be differentiated again.

    Gradients are correct also with ``create_graph=True``; differentiating them is a RuntimeError. With torch's
    ``once_differentiable``, ``torch.autograd.grad`` silently omits second derivatives.
    """

    @functools.wraps(backward)
    def first_only(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        return tuple(None if x is None else _Last.apply(x, *grads, *ctx.saved_tensors) for x in found)

    return first_only


class _Last(torch.autograd.Function):
    """Identity whose dependence on ``sources`` cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *sources: Tensor | None) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        what = "attention, SwiGLU and the loss are differentiable once"
        raise RuntimeError(f"second derivatives are not supported: {what}")
