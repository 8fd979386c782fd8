"""Output layer and cross-entropy in pieces along the sequence, so that a long sequence's logits never exist at once.

A vocabulary of 128K entries makes the logits of one token as large as the activations of a whole layer: those of a
128K-token sequence are 33 GB in bf16, and twice that in the float32 of the cross-entropy. Here a piece's logits are
computed, turned into losses and dropped; the backward pass computes them again, a piece at a time, which costs one more
product with the output layer. The weight's gradient is summed over the pieces in float32 and handed to autograd once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attention.once_differentiable import once_differentiable

# (hidden states [s, b, h], output weight [v, h], labels [b, s * parts]) -> losses [b, s * parts]; see chunked_losses.
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def chunked_losses(head: Head, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int | None) -> Tensor:
    """``head(hidden, weight, labels)``, but over at most about ``chunk_size`` tokens at once.

    Args:
        head: the output layer and the cross-entropy; each token's loss depends on this token alone. May communicate
            within the tensor-parallel group: all its ranks make the same calls.
        hidden: [s, b, h]; under sequence parallelism the tensor-parallel rank's own part of the sequence, whose
            whole the head gathers.
        weight: the output layer's, [v, h].
        labels: [b, s * parts], where ``parts`` is the number of ranks the sequence is split over (1 without sequence
            parallelism), in the order of the whole sequence.
        chunk_size: tokens whose logits may exist at once on a rank, None for all; at least one position of each row is
            taken.

    Returns:
        Losses like ``labels``, differentiable with respect to ``hidden`` and ``weight``.
    """
    rows, positions = hidden.shape[1], hidden.shape[0]
    parts = labels.shape[1] // positions
    size = positions if chunk_size is None else max(1, chunk_size // (rows * parts))
    if size >= positions:
        return head(hidden, weight, labels)
    return _ChunkedLosses.apply(hidden, weight, labels.contiguous(), head, size)


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: Head, size: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.head, ctx.size = head, size
        losses: Tensor | None = None
        for piece in _pieces(hidden, size):
            values = head(hidden[piece], weight, _labels_of(piece, labels, hidden))
            losses = values.new_empty(labels.shape) if losses is None else losses
            place = _place_of(piece, losses, hidden)
            place.copy_(values.view_as(place))
        assert losses is not None
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        losses_gradient = gradients[0].contiguous()
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient: Tensor | None = None
        for piece in _pieces(hidden, ctx.size):
            with torch.enable_grad():
                inputs = hidden[piece].detach().requires_grad_(), weight.detach().requires_grad_()
                losses = ctx.head(*inputs, _labels_of(piece, labels, hidden))
            gradient = _place_of(piece, losses_gradient, hidden).reshape(losses.shape)
            hidden_gradient[piece], of_weight = torch.autograd.grad(losses, inputs, gradient)
            del losses  # and with it the graph that holds the logits
            if weight_gradient is None:
                weight_gradient = of_weight if of_weight.dtype.itemsize >= 4 else of_weight.float()
            else:
                weight_gradient += of_weight
        assert weight_gradient is not None
        return hidden_gradient, weight_gradient.to(weight.dtype), None, None, None


def _pieces(hidden: Tensor, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, hidden.shape[0], size))


def _place_of(piece: slice, whole: Tensor, hidden: Tensor) -> Tensor:
    """A view of where a piece lies in ``whole`` [b, s * parts]: under sequence parallelism, in each rank's part."""
    return whole.view(whole.shape[0], -1, hidden.shape[0])[:, :, piece]


def _labels_of(piece: slice, labels: Tensor, hidden: Tensor) -> Tensor:
    return _place_of(piece, labels, hidden).reshape(labels.shape[0], -1)
