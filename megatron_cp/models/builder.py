"""Build this rank's model chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.fusions import fuses_gradient_sum
from megatron_cp.models.initial_weights import draw_part, seed_of
from megatron_cp.models.language_model import LanguageModel
from megatron_cp.models.layer_specs import gpt_block_spec, its_layers
from megatron_cp.models.layers.mtp import mtp_block_spec
from megatron_cp.models.local_rotary import LocalAndGlobalRotary
from megatron_cp.models.vocabulary import padded_vocab_size
from megatron_cp.models.yarn import kept_shares

if TYPE_CHECKING:
    from megatron_cp.models.hybrid import HybridLanguageModel


def build_model(
    model: ModelConfig,
    core_config: TransformerConfig,
    groups: ProcessGroupCollection,
    vocab_size: int,
    seed: int,
    core_attention: type,
) -> list[LanguageModel | HybridLanguageModel]:
    """This rank's chunks of the model, one a virtual pipeline stage, on this rank's device.

    Args:
        vocab_size: number of tokens the tokenizer knows, before padding.
        core_attention: the class of :func:`choose_attention`.
    """
    stages = model.virtual_pipeline_model_parallel_size
    vp_stages = [None] if stages is None else list(range(stages))
    return [
        _build_chunk(model, core_config, groups, vocab_size, vp_stage, seed, core_attention) for vp_stage in vp_stages
    ]


def _build_chunk(
    model: ModelConfig,
    core_config: TransformerConfig,
    groups: ProcessGroupCollection,
    vocab_size: int,
    vp_stage: int | None,
    seed: int,
    core_attention: type,
) -> LanguageModel | HybridLanguageModel:
    with_yarn = model.position_embedding_type == "yarn"
    stage, stages = groups.pp.rank(), groups.pp.size()
    last_vp_stage = (model.virtual_pipeline_model_parallel_size or 1) - 1
    is_last = stage == stages - 1 and (vp_stage is None or vp_stage == last_vp_stage)
    common: dict[str, Any] = dict(
        vocab_size=padded_vocab_size(model, vocab_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=stage == 0 and (vp_stage or 0) == 0,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type="rope" if with_yarn else model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=int(model.rotary_base),
        seq_len_interpolation_factor=model.seq_len_interpolation_factor,
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    if model.architecture == "hybrid":
        # Imported here: Mamba's modules bring kernels along that no other model needs.
        from megatron_cp.models.hybrid import build_hybrid

        chunk: LanguageModel | HybridLanguageModel = build_hybrid(model, core_config, seed, core_attention, **common)
    else:
        block, layer = gpt_block_spec(model, core_config, groups, vp_stage, seed, core_attention)
        mtp = None
        if is_last and model.mtp_num_layers:
            mtp = mtp_block_spec(model, seed, layer, block.layer_norm, its_layers(core_config))
        chunk = LanguageModel(
            config=core_config,
            transformer_layer_spec=block,
            mtp_block_spec=mtp,
            rope_scaling=model.rope_scaling,
            rope_scaling_factor=model.rope_scaling_factor,
            **common,
        )
    if with_yarn and not model.multi_latent_attention:  # which has positions of its own in every layer
        _lengthen_positions(chunk.rotary_pos_emb, model)
    if model.has_local_rotary:
        chunk.rotary_pos_emb = LocalAndGlobalRotary(chunk.rotary_pos_emb, model)
    if model.scale_embeddings and (chunk.pre_process or chunk.mtp_process):
        _scale_embeddings(chunk.embedding.word_embeddings, model.hidden_size)
    chunk.cross_entropy_chunk_size = model.cross_entropy_chunk_size
    if core_config.use_cpu_initialization and core_config.perform_initialization:
        _seed_vocabulary_weights(chunk, core_config, groups, seed)
    if fuses_gradient_sum(model, its_layers(core_config)):
        _let_products_sum_gradients(chunk)
    if torch.cuda.is_available():
        chunk.cuda(torch.cuda.current_device())
    return chunk


def _lengthen_positions(embedding: Any, model: ModelConfig) -> None:
    """YaRN is the ordinary rotary embedding with other frequencies.

    Upstream's own module asks the MPU for its group in GPT models, and slices a table of the original length by it.
    """
    plain = embedding.inv_freq
    kept = plain.new_tensor(kept_shares(model, 2 * len(plain)))
    embedding.inv_freq = plain / model.yarn_rotary_scaling_factor * (1 - kept) + plain * kept


def _scale_embeddings(embedding: Any, hidden_size: int) -> None:
    """Multiply an embedding's output by sqrt(hidden_size), rounded to the weights' dtype as Gemma's is."""
    scale = torch.tensor(hidden_size**0.5, dtype=embedding.weight.dtype, device="cpu").item()
    embedding.register_forward_hook(lambda module, tokens, output: output * scale)


def _let_products_sum_gradients(chunk: torch.nn.Module) -> None:
    """In the layers of Transformer Engine. Asked for by megatron-core's own setting, its output layer wants apex."""
    module: Any
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _seed_vocabulary_weights(
    chunk: LanguageModel | HybridLanguageModel,
    core_config: TransformerConfig,
    groups: ProcessGroupCollection,
    seed: int,
) -> None:
    """Draw the embedding and the output layer from seeds of their own: the same ones under every layout."""
    weights = {}
    if chunk.pre_process or chunk.mtp_process:
        weights["embedding"] = chunk.embedding.word_embeddings.weight
    if chunk.post_process:
        if not chunk.share_embeddings_and_output_weights:
            weights["output"] = chunk.output_layer.weight
        elif "embedding" not in weights:
            weights["embedding"] = chunk.output_layer.weight  # the last stage's copy of the tied weight
    for name, weight in weights.items():
        method = core_config.embedding_init_method if name == "embedding" else core_config.init_method
        draw_part(weight, seed_of(seed, name), method, core_config.params_dtype, groups.tp, 0)
