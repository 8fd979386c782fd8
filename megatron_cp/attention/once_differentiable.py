"""Backward passes that are no differentiable functions themselves, under ``create_graph=True``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Decorate an autograd function's backward: its gradients are right also where a graph of them is asked for, and
    differentiating them is a RuntimeError.

    torch's ``once_differentiable`` leaves second derivatives out without a word where they are asked for by
    ``torch.autograd.grad``: its gradients do not know what they depend on.
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
    """The same value, which depends on ``sources`` in a way that is not computed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *sources: Tensor | None) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError("there are no second derivatives here: attention and the loss are differentiable once")
