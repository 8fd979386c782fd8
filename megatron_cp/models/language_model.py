"""megatron-core's language models with exact multi-token and chunked losses."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from megatron_cp.dynamic_cp.runtime.active_group import active_group
from megatron_cp.models.layers.chunked_loss import chunked_losses
from megatron_cp.models.layers.mtp import shift_left
from megatron_cp.models.layers.predictions import is_most_likely
from megatron_cp.models.layers.router import shard_padding_mask

# Inputs that megatron-core's GPT model passes to layers of multi-token prediction.
_POSITIONS = ("position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
_LAYER_INPUTS = ("input_ids", "attention_mask", "packed_seq_params", "padding_mask", *_POSITIONS)


class LanguageModelMixin(LanguageModule):
    """Losses and tied weights of GPT and hybrid models."""

    cross_entropy_chunk_size: int | None = None  # tokens whose logits exist at once; None: all
    marks_errors = False  # losses are negative where another token is more likely than the label

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_process and not self.pre_process and self.share_embeddings_and_output_weights:
            # The embedding's copy on this stage is the output layer's weight. The layer's own weight, which upstream
            # also allocates, is never used, reduced or saved.
            self.output_layer.weight = None

    def _set_attention_backend(self) -> None:
        """Leave the user's NVTE variables unchanged.

        Upstream refuses a 0 in them, also for our own attention, which ignores them, and sets missing ones to 1
        (Transformer Engine's default).
        """

    def compute_output(
        self: Any,
        hidden_states: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        **layer_inputs: Any,
    ) -> Tensor:
        """Return the last stage's logits, or with labels per-token losses.

        Losses are ``[b, s_local]``; with multi-token prediction in training ``[1 + depths, b, s_local]``: the main loss
        without a mask, then each depth's with its own (shifted) ``loss_mask``.
        """
        if labels is None:
            return self._logits(hidden_states, self._output_weight()).transpose(0, 1).contiguous()
        if not (self.mtp_process and self.training):
            return self._losses(hidden_states, labels)
        states = self.mtp(
            hidden_states=hidden_states, packed_seq_params=packed_seq_params, embedding=self.embedding, **layer_inputs
        )
        main, *depths = states.chunk(1 + self.config.mtp_num_layers)
        losses = [self._losses(main, labels)]
        mask = torch.ones_like(labels, dtype=losses[0].dtype) if loss_mask is None else loss_mask
        for depth in depths:
            with active_group(self.pg_collection, packed_seq_params):
                labels = shift_left(labels, self.pg_collection.cp, packed_seq_params)
                mask = shift_left(mask, self.pg_collection.cp, packed_seq_params)
            losses.append(self._losses(depth, labels) * mask)
        return torch.stack(losses)

    def _losses(self: Any, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return losses [b, s] of hidden states [s, b, h] (of this rank's shard)."""

        def losses_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return self.compute_language_model_loss(labels, self._logits(hidden, weight))

        return chunked_losses(losses_of, hidden_states, self._output_weight(), labels, self.cross_entropy_chunk_size)

    def _output_weight(self: Any) -> Tensor:
        """Return the output layer's weight, or the embedding's if they are tied."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def _logits(self: Any, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """Return logits [s, b, v of this rank], scaled with ``use_mup``."""
        logits, _ = self.output_layer(hidden_states, weight=weight)
        return self._scale_logits(logits)

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        """Return per-token losses [b, s] of logits [s, b, v].

        With ``marks_errors`` their sign tells wrong predictions: it passes through chunks and costs no memory. The loss
        of a wrong prediction is above 0.69, so it has a sign.

        Upstream's call has Transformer Engine's kernel check in each backward pass whether all gradients are 1, which
        makes the host wait for the device.
        """
        if self.marks_errors:  # before the loss, which may overwrite the logits
            right = is_most_likely(labels, logits, self.pg_collection.tp)
            losses = self._losses_of_logits(labels, logits)
            return torch.where(right, losses, -losses)
        return self._losses_of_logits(labels, logits)

    def _losses_of_logits(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        if not (self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == "te"):
            return super().compute_language_model_loss(labels, logits)
        from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy

        # The kernel reads the stride of the last dimension, which is arbitrary if there is one row.
        labels = labels.transpose(0, 1).flatten().view(logits.shape[:2])
        losses = te_parallel_cross_entropy(logits, labels, self.pg_collection.tp, is_cg_capturable=True)
        return losses.transpose(0, 1).contiguous()

    def tie_embeddings_and_output_weights_state_dict(
        self: Any, sharded_state_dict: dict[str, Any], output: str, embedding: str, metadata: dict[str, Any]
    ) -> None:
        """Save this stage's copy of the embedding in place of an output layer."""
        if not self.post_process or self.pre_process or self.mtp_process:
            return  # it has no output layer of its own
        # Upstream reads this rank's replica id from the global state.
        group = metadata["dp_cp_group"]
        sharded_state_dict[output] = make_tp_sharded_tensor_for_checkpoint(
            self.shared_embedding_or_output_weight(),
            embedding,
            replica_id=(1, 0, group.rank()),  # 1: copy of the first stage's
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=group,
        )


class LanguageModel(LanguageModelMixin, GPTModel):
    """GPT model whose last stage returns losses if there are ``labels``."""

    def _preprocess(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> tuple:
        """Prepare inputs, and gather the padding mask for the routers."""
        *prepared, _ = super()._preprocess(*args, **kwargs)
        return (*prepared, shard_padding_mask(padding_mask, self.config, self.pg_collection))

    def _postprocess(
        self, hidden_states: Tensor, labels: Tensor | None, loss_mask: Tensor | None, **inputs: Any
    ) -> Any:
        if not self.post_process:
            return hidden_states
        return self.compute_output(hidden_states, labels, loss_mask, **{name: inputs[name] for name in _LAYER_INPUTS})
