"""SwiGLU without copies, for layers that have no kernel of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_cp.attention.once_differentiable import once_differentiable


def gated_silu(x: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` [..., n] of ``x`` = (gate, up) [..., 2 n].

    Forward and backward it equals the plain operations to the bit, but for the sign of zeros. Those add an offset of
    zero to ``up``, keep two more tensors of the result's size, and copy the gradients of gate and up into one tensor.
    Here the backward pass computes ``silu`` again, which takes less time than that.
    """
    return _GatedSilu.apply(x)


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        found = torch.empty_like(x)
        of_gate, of_up = found.chunk(2, -1)
        torch.mul(gradients[0], F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=of_gate)
        return (found,)
