"""Build this rank's model chunks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from megatron_cp.config import RunConfig
from megatron_cp.models.layer_specs import gpt_block_spec, seed_of
from megatron_cp.models.transformer_config import padded_vocab_size


class LanguageModel(GPTModel):
    """megatron-core's model, whose tied output layer on a last stage can be saved without the MPU's global state."""

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: dict[str, Any],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict[str, Any],
    ) -> None:
        if not self.post_process or self.pre_process:
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


def build_model(
    config: RunConfig, core_config: TransformerConfig, groups: ProcessGroupCollection, vocab_size: int
) -> list[LanguageModel]:
    """This rank's chunks of the model, one a virtual pipeline stage, on this rank's device.

    Args:
        vocab_size: number of tokens the tokenizer knows, before padding.
    """
    stages = config.model.virtual_pipeline_model_parallel_size
    vp_stages = [None] if stages is None else list(range(stages))
    return [_build_chunk(config, core_config, groups, vocab_size, vp_stage) for vp_stage in vp_stages]


def _build_chunk(
    config: RunConfig,
    core_config: TransformerConfig,
    groups: ProcessGroupCollection,
    vocab_size: int,
    vp_stage: int | None,
) -> LanguageModel:
    model = config.model
    stage, stages = groups.pp.rank(), groups.pp.size()
    last_vp_stage = (model.virtual_pipeline_model_parallel_size or 1) - 1
    chunk = LanguageModel(
        config=core_config,
        transformer_layer_spec=gpt_block_spec(config, core_config, groups, vp_stage),
        vocab_size=padded_vocab_size(config, vocab_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=stage == 0 and (vp_stage or 0) == 0,
        post_process=stage == stages - 1 and (vp_stage is None or vp_stage == last_vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=int(model.rotary_base),
        rope_scaling=model.rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.seq_len_interpolation_factor,
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    if core_config.use_cpu_initialization:
        _seed_vocabulary_weights(chunk, core_config, groups, config.rng.seed)
    if torch.cuda.is_available():
        chunk.cuda(torch.cuda.current_device())
    return chunk


def _seed_vocabulary_weights(
    chunk: LanguageModel, core_config: TransformerConfig, groups: ProcessGroupCollection, seed: int
) -> None:
    """Draw the embedding and the output layer from seeds of their own: the same ones under every layout."""
    weights = {}
    if chunk.pre_process:
        weights["embedding"] = chunk.embedding.word_embeddings.weight
    if chunk.post_process:
        if not chunk.share_embeddings_and_output_weights:
            weights["output"] = chunk.output_layer.weight
        elif not chunk.pre_process:
            weights["embedding"] = chunk.output_layer.weight  # the last stage's copy of the tied weight
    for name, weight in weights.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, name))
            _initialize_affine_weight_cpu(
                weight,
                chunk.vocab_size,
                core_config.hidden_size,
                weight.shape[0],
                0,
                core_config.embedding_init_method if name == "embedding" else core_config.init_method,
                params_dtype=core_config.params_dtype,
                rank=groups.tp.rank(),
                world_size=groups.tp.size(),
                skip_set_tensor_parallel_attributes=True,
            )
