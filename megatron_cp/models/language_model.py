"""megatron-core's GPT model with exact losses: multi-token prediction, and logits in pieces."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from megatron_cp.dynamic_cp.active_group import active_group
from megatron_cp.models.chunked_loss import chunked_losses
from megatron_cp.models.mtp import shift_left


class LanguageModel(GPTModel):
    """With ``labels`` the last stage returns per-token losses, ``[b, s_local]``.

    With multi-token prediction, while training, they are ``[1 + depths, b, s_local]``: the main loss without any mask,
    and each depth's under its own (shifted) ``loss_mask``. A tied output layer, and the copy of the embedding on a
    last stage, can be saved without the MPU's global state.

    Args:
        cross_entropy_chunk_size: tokens whose logits may exist at once (see ``chunked_loss``), None: all of them.
    """

    def __init__(self, *args: Any, cross_entropy_chunk_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cross_entropy_chunk_size = cross_entropy_chunk_size
        if self.mtp_process and not self.pre_process and self.share_embeddings_and_output_weights:
            # The embedding's copy on this stage is the output layer's weight. Upstream also allocates the layer's own,
            # which nobody uses, reduces or expects in a checkpoint.
            self.output_layer.weight = None

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        rotary_pos_emb: Tensor | None,
        rotary_pos_cos: Tensor | None,
        rotary_pos_sin: Tensor | None,
        loss_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if labels is None:
            logits, _ = self.output_layer(hidden_states, weight=weight)
            return logits.transpose(0, 1).contiguous()
        if not (self.mtp_process and self.training):
            return self._losses(hidden_states, weight, labels)
        states = self.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            packed_seq_params=packed_seq_params,
            embedding=self.embedding,
        )
        main, *depths = states.chunk(1 + self.config.mtp_num_layers)
        losses = [self._losses(main, weight, labels)]
        mask = torch.ones_like(labels, dtype=losses[0].dtype) if loss_mask is None else loss_mask
        for depth in depths:
            with active_group(self.pg_collection, packed_seq_params):
                labels = shift_left(labels, self.pg_collection.cp, packed_seq_params)
                mask = shift_left(mask, self.pg_collection.cp, packed_seq_params)
            losses.append(self._losses(depth, weight, labels) * mask)
        return torch.stack(losses)

    def _losses(self, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        size = self.cross_entropy_chunk_size
        if size is None:
            return self._head(hidden_states, weight, labels)
        return chunked_losses(self._head, hidden_states, weight, labels, size)

    def _head(self, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits, _ = self.output_layer(hidden_states, weight=weight)
        return self.compute_language_model_loss(labels, logits)

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: dict[str, Any],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict[str, Any],
    ) -> None:
        if not self.post_process or self.pre_process or self.mtp_process:
            super().tie_embeddings_and_output_weights_state_dict(
                sharded_state_dict, output_layer_weight_key, first_stage_word_emb_key, metadata
            )
            return
        # Upstream asks the global state for this rank's number among its replicas.
        group = metadata["dp_cp_group"]
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            self.shared_embedding_or_output_weight(),
            first_stage_word_emb_key,
            replica_id=(1, 0, group.rank()),  # 1: a copy of the first stage's
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=group,
        )
