"""Build this rank's model chunks: megatron-core's model and transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.build import Build
from megatron_cp.models.fusions import fuses_gradient_sum
from megatron_cp.models.initial_weights import draw_part, seed_of
from megatron_cp.models.language_model import LanguageModel
from megatron_cp.models.layer_specs import gpt_block_spec
from megatron_cp.models.layers.mlp.tiles import tile_last_norm, tile_mlps
from megatron_cp.models.layers.mtp import mtp_block_spec
from megatron_cp.models.layers.recomputed_layers import OffloadedInputs, free_outputs
from megatron_cp.models.local_rotary import LocalAndGlobalRotary
from megatron_cp.models.vocabulary import padded_vocab_size
from megatron_cp.models.yarn import kept_fractions

if TYPE_CHECKING:
    from megatron_cp.models.hybrid import HybridLanguageModel

    type Chunk = LanguageModel | HybridLanguageModel


def build_model(build: Build, vocab_size: int) -> list[Chunk]:
    """Build this rank's chunks, one a virtual pipeline stage, on this rank's device.

    ``vocab_size``: number of the tokenizer's tokens, before padding.
    """
    stages = build.model.virtual_pipeline_model_parallel_size
    chunks = [_build_chunk(build, vocab_size, vp_stage) for vp_stage in ([None] if stages is None else range(stages))]
    share_rotary_tables(chunks)
    return chunks


def _build_chunk(build: Build, vocab_size: int, vp_stage: int | None) -> Chunk:
    model, stage = build.model, build.groups.pp.rank()
    last_vp_stage = (model.virtual_pipeline_model_parallel_size or 1) - 1
    is_last = stage == build.groups.pp.size() - 1 and vp_stage in (None, last_vp_stage)
    common: dict[str, Any] = dict(
        vocab_size=padded_vocab_size(model, vocab_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=stage == 0 and (vp_stage or 0) == 0,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type="rope" if _has_yarn(model) else model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=int(model.rotary_base),
        seq_len_interpolation_factor=model.seq_len_interpolation_factor,
        pg_collection=build.groups,
        vp_stage=vp_stage,
    )
    if model.architecture == "hybrid":
        # Imported here: Mamba's modules import kernels that no other model needs.
        from megatron_cp.models.hybrid import build_hybrid

        chunk: Chunk = build_hybrid(build, **common)
    else:
        block, layer = gpt_block_spec(build, vp_stage)
        chunk = LanguageModel(
            config=build.core_config,
            transformer_layer_spec=block,
            mtp_block_spec=mtp_block_spec(build, layer) if is_last and model.mtp_num_layers else None,
            rope_scaling=model.rope_scaling,
            rope_scaling_factor=model.rope_scaling_factor,
            **common,
        )
    for transform in CHUNK_TRANSFORMS:
        transform(chunk, build)
    return chunk


def share_rotary_tables(chunks: Sequence[torch.nn.Module]) -> None:
    """Let all chunks, and all layers of latent attention, use one rotary embedding.

    Each keeps tables for all positions of a sequence. They are equal in a model.
    """
    shared: torch.nn.Module | None = None
    for module in [module for chunk in chunks for module in chunk.modules()]:
        if isinstance(own := getattr(module, "rotary_pos_emb", None), torch.nn.Module):
            module.rotary_pos_emb = shared = shared or own


def _has_yarn(model: ModelConfig) -> bool:
    return model.position_embedding_type == "yarn"


def apply_yarn(chunk: Chunk, build: Build) -> None:
    """Replace the rotary frequencies by YaRN's.

    Upstream's module reads its group from the global state in GPT models, and slices a table of the original length.
    """
    model = build.model
    if not _has_yarn(model) or model.multi_latent_attention:  # latent attention has positions in every layer
        return
    embedding = chunk.rotary_pos_emb
    plain = embedding.inv_freq
    kept = plain.new_tensor(kept_fractions(model, 2 * len(plain)))
    embedding.inv_freq = plain / model.yarn_rotary_scaling_factor * (1 - kept) + plain * kept


def add_local_rotary(chunk: Chunk, build: Build) -> None:
    """Give layers with a sliding window their own rotary base."""
    if build.model.has_local_rotary:
        chunk.rotary_pos_emb = LocalAndGlobalRotary(chunk.rotary_pos_emb, build.model)


def scale_embeddings(chunk: Chunk, build: Build) -> None:
    """Multiply embeddings by sqrt(hidden_size), rounded to the weights' dtype.

    Gemma rounds in the same way.
    """
    if not build.model.scale_embeddings or not (chunk.pre_process or chunk.mtp_process):
        return
    embedding = chunk.embedding.word_embeddings
    scale = torch.tensor(build.model.hidden_size**0.5, dtype=embedding.weight.dtype, device="cpu").item()
    embedding.register_forward_hook(lambda module, tokens, output: output * scale)


def set_loss_chunk_size(chunk: Chunk, build: Build) -> None:
    """Set the number of tokens whose loss is computed at once."""
    chunk.cross_entropy_chunk_size = build.model.cross_entropy_chunk_size


def hold_less_of_recomputed_layers(chunk: Chunk, build: Build) -> None:
    """Free their outputs in the backward pass, and keep their inputs in host memory."""
    if build.model.offload_layer_inputs:
        OffloadedInputs(chunk.decoder, build.host_memory, received=not chunk.pre_process, ends_model=chunk.post_process)
    elif build.model.recompute_granularity == "full":
        free_outputs(chunk.decoder)


def set_mlp_chunk_size(chunk: Chunk, build: Build) -> None:
    """Set the number of tokens whose MLP, or last norm, is computed at once."""
    if build.model.mlp_chunk_size is not None:
        depths = chunk.mtp.modules() if chunk.mtp_process else ()
        tile_mlps(chunk.decoder.layers, list(depths), build.model)
        tile_last_norm(chunk.decoder, build.model)


def seed_vocabulary(chunk: Chunk, build: Build) -> None:
    """Draw embedding and output layer from their own seeds: equal under every layout."""
    core_config = build.core_config
    if not (core_config.use_cpu_initialization and core_config.perform_initialization):
        return
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
        draw_part(weight, seed_of(build.seed, name), method, core_config.params_dtype, build.groups.tp, 0)


def fuse_gradient_sums(chunk: Chunk, build: Build) -> None:
    """Sum weight gradients inside Transformer Engine's products.

    Not by megatron-core's setting: with it, megatron-core's output layer requires apex.
    """
    if not fuses_gradient_sum(build.model, build.with_te):
        return
    module: Any
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def move_to_device(chunk: Chunk, build: Build) -> None:
    if torch.cuda.is_available():
        chunk.cuda(torch.cuda.current_device())


CHUNK_TRANSFORMS = (  # in order: each changes a chunk in place
    apply_yarn,
    add_local_rotary,
    scale_embeddings,
    set_loss_chunk_size,
    hold_less_of_recomputed_layers,
    set_mlp_chunk_size,
    seed_vocabulary,
    fuse_gradient_sums,
    move_to_device,
)
