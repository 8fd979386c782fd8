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

from megatron_cp.attention.once_differentiable import differentiable_once

# (hidden states [s, b, h], output weight [v, h], labels [b, s * parts]) -> losses [b, s * parts]; see chunked_losses.
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def chunked_losses(head: Head, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int) -> Tensor:
    """``head(hidden, weight, labels)``, but over at most about ``chunk_size`` tokens at once.

    Args:
        head: the output layer and the cross-entropy; each token's loss depends on this token alone. May communicate
            within the tensor-parallel group: all its ranks make the same calls.
        hidden: [s, b, h]; under sequence parallelism the tensor-parallel rank's own part of the sequence, whose
            whole the head gathers.
        weight: the output layer's, [v, h].
        labels: [b, s * parts], where ``parts`` is the number of ranks the sequence is split over (1 without sequence
            parallelism), in the order of the whole sequence.
        chunk_size: tokens whose logits may exist at once on a rank; at least one position of each row is taken.

    Returns:
        Losses like ``labels``, differentiable with respect to ``hidden`` and ``weight``.
    """
    rows, positions = hidden.shape[1], hidden.shape[0]
    parts = labels.shape[1] // positions
    size = max(1, chunk_size // (rows * parts))
    if size >= positions:
        return head(hidden, weight, labels)
    return _ChunkedLosses.apply(hidden, weight, labels.contiguous(), head, size)


class LossesInPieces:
    """For megatron-core's language models: the losses of hidden states, in pieces where so configured."""

    cross_entropy_chunk_size: int | None = None  # tokens whose logits may exist at once; None: all of them

    def output_weight(self: Any) -> Tensor:
        """The output layer's, or the embedding's where they are tied."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def losses_of(self: Any, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Per-token losses [b, s] of hidden states [s, b, h] (under sequence parallelism: of this rank's part)."""
        if self.cross_entropy_chunk_size is None:
            return self._losses_at_once(hidden_states, self.output_weight(), labels)
        return chunked_losses(
            self._losses_at_once, hidden_states, self.output_weight(), labels, self.cross_entropy_chunk_size
        )

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        """Per-token losses [b, s] of logits [s, b, v]. megatron-core's; it lets Transformer Engine's kernel ask in each
        backward pass whether all gradients are 1, and with it the host waits for the device."""
        if not (self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == "te"):
            return super().compute_language_model_loss(labels, logits)  # type: ignore[misc]
        from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy

        # The kernel goes by the stride of the last dimension, which may be anything where there is one row.
        labels = labels.transpose(0, 1).flatten().view(logits.shape[:2])
        losses = te_parallel_cross_entropy(logits, labels, self.pg_collection.tp, is_cg_capturable=True)
        return losses.transpose(0, 1).contiguous()

    def _losses_at_once(self: Any, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return self.compute_language_model_loss(labels, self.logits_of(hidden_states, weight))

    def logits_of(self: Any, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """Logits [s, b, v of this rank] of hidden states, times ``mup_output_mult`` with ``use_mup``."""
        logits, _ = self.output_layer(hidden_states, weight=weight)
        return self._scale_logits(logits)


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
    @differentiable_once
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
