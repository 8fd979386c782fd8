"""The output layer that is the embedding, on a last pipeline stage, in a checkpoint."""

from __future__ import annotations

from typing import Any

from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint


class TiedWithoutGlobalState:
    """For megatron-core's language models: a tied output layer can be saved without the MPU's global state."""

    def tie_embeddings_and_output_weights_state_dict(
        self: Any,
        sharded_state_dict: dict[str, Any],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict[str, Any],
    ) -> None:
        """Put this stage's copy of the embedding in the place of an output layer of its own."""
        if not self.post_process or self.pre_process or self.mtp_process:
            super().tie_embeddings_and_output_weights_state_dict(  # type: ignore[misc]
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
