"""megatron-core's GPT model with exact losses: multi-token prediction, and logits in pieces."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_cp.dynamic_cp.active_group import active_group
from megatron_cp.models.chunked_loss import LossesInPieces
from megatron_cp.models.mtp import shift_left
from megatron_cp.models.router import padding_in_layers
from megatron_cp.models.tied_weights import TiedWithoutGlobalState


class LanguageModel(LossesInPieces, TiedWithoutGlobalState, GPTModel):
    """With ``labels`` the last stage returns per-token losses, ``[b, s_local]``.

    With multi-token prediction, while training, they are ``[1 + depths, b, s_local]``: the main loss without any mask,
    and each depth's under its own (shifted) ``loss_mask``. A tied output layer, and the copy of the embedding on a
    last stage, can be saved without the MPU's global state.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_process and not self.pre_process and self.share_embeddings_and_output_weights:
            # The embedding's copy on this stage is the output layer's weight. Upstream also allocates the layer's own,
            # which nobody uses, reduces or expects in a checkpoint.
            self.output_layer.weight = None

    def _set_attention_backend(self) -> None:
        """Nothing: the user's NVTE variables stand. Upstream refuses a 0 in them, also where our own attention, which
        does not read them, computes, and writes 1 (Transformer Engine's default) where there was none."""

    def _preprocess(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> tuple:
        """megatron-core's, but for the padding mask."""
        *prepared, _ = super()._preprocess(*args, **kwargs)
        return (*prepared, padding_in_layers(padding_mask, self.config, self.pg_collection))

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
        padding_mask: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        if labels is None:
            logits, _ = self.output_layer(hidden_states, weight=self.output_weight())
            return logits.transpose(0, 1).contiguous()
        if not (self.mtp_process and self.training):
            return self.losses_of(hidden_states, labels)
        states = self.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            packed_seq_params=packed_seq_params,
            padding_mask=padding_mask,
            embedding=self.embedding,
        )
        main, *depths = states.chunk(1 + self.config.mtp_num_layers)
        losses = [self.losses_of(main, labels)]
        mask = torch.ones_like(labels, dtype=losses[0].dtype) if loss_mask is None else loss_mask
        for depth in depths:
            with active_group(self.pg_collection, packed_seq_params):
                labels = shift_left(labels, self.pg_collection.cp, packed_seq_params)
                mask = shift_left(mask, self.pg_collection.cp, packed_seq_params)
            losses.append(self.losses_of(depth, labels) * mask)
        return torch.stack(losses)
