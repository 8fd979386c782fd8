"""Output layer and cross-entropy in chunks along the sequence.

With a vocabulary of 128K the logits of one token are as large as a whole layer's activations: 33 GB in bf16 for 128K
tokens, and twice that for the float32 of the cross-entropy. Here the logits of one chunk exist at a time. The backward
pass computes them again, which costs one more product with the output layer. The weight's gradient is summed over
chunks in float32 and passed to autograd once.
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
    """Compute ``head(hidden, weight, labels)`` in chunks of tokens.

    Args:
        head: output layer and cross-entropy; each token's loss depends on this token only. May communicate within the
            tensor-parallel group, whose ranks make the same calls.
        hidden: [s, b, h]; under sequence parallelism this rank's shard, which the head gathers.
        weight: the output layer's, [v, h].
        labels: [b, s * parts], in the order of the whole sequence. ``parts`` is the number of ranks that shard it
            (1 without sequence parallelism).
        chunk_size: tokens whose logits may exist at once on a rank, at least one position of each row; None: all.

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
        for chunk in _chunks(hidden, size):
            values = head(hidden[chunk], weight, _labels_of(chunk, labels, hidden))
            losses = values.new_empty(labels.shape) if losses is None else losses
            target = _chunk_of(chunk, losses, hidden)
            target.copy_(values.view_as(target))
        assert losses is not None
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        losses_gradient = gradients[0].contiguous()
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient: Tensor | None = None
        for chunk in _chunks(hidden, ctx.size):
            with torch.enable_grad():
                inputs = hidden[chunk].detach().requires_grad_(), weight.detach().requires_grad_()
                losses = ctx.head(*inputs, _labels_of(chunk, labels, hidden))
            gradient = _chunk_of(chunk, losses_gradient, hidden).reshape(losses.shape)
            hidden_gradient[chunk], chunk_gradient = torch.autograd.grad(losses, inputs, gradient)
            del losses  # frees the graph that holds the logits
            if weight_gradient is None:
                weight_gradient = chunk_gradient if chunk_gradient.dtype.itemsize >= 4 else chunk_gradient.float()
            else:
                weight_gradient += chunk_gradient
            del chunk_gradient  # as large as the weight, where the next chunk makes its own
        assert weight_gradient is not None
        return hidden_gradient, weight_gradient.to(weight.dtype), None, None, None


def _chunks(hidden: Tensor, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, hidden.shape[0], size))


def _chunk_of(chunk: slice, whole: Tensor, hidden: Tensor) -> Tensor:
    """Return a view of a chunk in ``whole`` [b, s * parts], in each rank's shard."""
    return whole.view(whole.shape[0], -1, hidden.shape[0])[:, :, chunk]


def _labels_of(chunk: slice, labels: Tensor, hidden: Tensor) -> Tensor:
    return _chunk_of(chunk, labels, hidden).reshape(labels.shape[0], -1)
