"""megatron-core's language models with exact losses: multi-token prediction, and logits in pieces."""

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
from megatron_cp.models.layers.router import padding_in_layers

# What megatron-core's GPT model hands to the layers of multi-token prediction.
_POSITIONS = ("position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
_TO_LAYERS = ("input_ids", "attention_mask", "packed_seq_params", "padding_mask", *_POSITIONS)


class LanguageModelMixin(LanguageModule):
    """For megatron-core's GPT and hybrid models: the losses of hidden states, and tied weights in a checkpoint."""

    cross_entropy_chunk_size: int | None = None  # tokens whose logits may exist at once; None: all of them

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_process and not self.pre_process and self.share_embeddings_and_output_weights:
            # The embedding's copy on this stage is the output layer's weight. Upstream also allocates the layer's own,
            # which nobody uses, reduces or expects in a checkpoint.
            self.output_layer.weight = None

    def _set_attention_backend(self) -> None:
        """Nothing: the user's NVTE variables stand. Upstream refuses a 0 in them, also where our own attention, which
        does not read them, computes, and writes 1 (Transformer Engine's default) where there was none."""

    def ending(
        self: Any,
        hidden_states: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        **to_layers: Any,
    ) -> Tensor:
        """What a last stage returns of its hidden states: logits ``[b, s_local, v]``, or with labels per-token losses.

        They are ``[b, s_local]``; with multi-token prediction, while training, ``[1 + depths, b, s_local]``: the main
        loss without any mask, and each depth's under its own (shifted) ``loss_mask``.
        """
        if labels is None:
            return self._logits(hidden_states, self._output_weight()).transpose(0, 1).contiguous()
        if not (self.mtp_process and self.training):
            return self._losses(hidden_states, labels)
        states = self.mtp(
            hidden_states=hidden_states, packed_seq_params=packed_seq_params, embedding=self.embedding, **to_layers
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
        """Per-token losses [b, s] of hidden states [s, b, h] (under sequence parallelism: of this rank's part)."""

        def at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return self.compute_language_model_loss(labels, self._logits(hidden, weight))

        return chunked_losses(at_once, hidden_states, self._output_weight(), labels, self.cross_entropy_chunk_size)

    def _output_weight(self: Any) -> Tensor:
        """The output layer's, or the embedding's where they are tied."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def _logits(self: Any, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """Logits [s, b, v of this rank] of hidden states, times ``mup_output_mult`` with ``use_mup``."""
        logits, _ = self.output_layer(hidden_states, weight=weight)
        return self._scale_logits(logits)

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        """Per-token losses [b, s] of logits [s, b, v]. megatron-core's; it lets Transformer Engine's kernel ask in each
        backward pass whether all gradients are 1, and with it the host waits for the device."""
        if not (self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == "te"):
            return super().compute_language_model_loss(labels, logits)
        from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy

        # The kernel goes by the stride of the last dimension, which may be anything where there is one row.
        labels = labels.transpose(0, 1).flatten().view(logits.shape[:2])
        losses = te_parallel_cross_entropy(logits, labels, self.pg_collection.tp, is_cg_capturable=True)
        return losses.transpose(0, 1).contiguous()

    def tie_embeddings_and_output_weights_state_dict(
        self: Any, sharded_state_dict: dict[str, Any], output: str, embedding: str, metadata: dict[str, Any]
    ) -> None:
        """Put this stage's copy of the embedding in the place of an output layer of its own."""
        if not self.post_process or self.pre_process or self.mtp_process:
            return  # it has no output layer of its own
        # Upstream asks the global state for this rank's number among its replicas.
        group = metadata["dp_cp_group"]
        sharded_state_dict[output] = make_tp_sharded_tensor_for_checkpoint(
            self.shared_embedding_or_output_weight(),
            embedding,
            replica_id=(1, 0, group.rank()),  # 1: a copy of the first stage's
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=group,
        )


class LanguageModel(LanguageModelMixin, GPTModel):
    """With ``labels`` the last stage returns per-token losses; see :meth:`LanguageModelMixin.ending`."""

    def _preprocess(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> tuple:
        """megatron-core's, but for the padding mask."""
        *prepared, _ = super()._preprocess(*args, **kwargs)
        return (*prepared, padding_in_layers(padding_mask, self.config, self.pg_collection))

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None, loss_mask: Tensor | None, **given: Any) -> Any:
        if not self.post_process:
            return hidden_states
        return self.ending(hidden_states, labels, loss_mask, **{name: given[name] for name in _TO_LAYERS})
