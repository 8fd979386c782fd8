"""megatron-core's GPT model with exact losses: multi-token prediction, and logits in pieces."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_cp.models.layers.chunked_loss import LossesInPieces
from megatron_cp.models.layers.mtp import FurtherTokens
from megatron_cp.models.layers.router import padding_in_layers
from megatron_cp.models.layers.tied_weights import TiedWithoutGlobalState


class LanguageModel(FurtherTokens, LossesInPieces, TiedWithoutGlobalState, GPTModel):
    """With ``labels`` the last stage returns per-token losses; see :meth:`FurtherTokens.ending`.

    A tied output layer, and the copy of the embedding on a last stage, can be saved without the MPU's global state.
    """

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
        return self.ending(
            hidden_states,
            labels,
            loss_mask,
            packed_seq_params,
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            padding_mask=padding_mask,
        )
