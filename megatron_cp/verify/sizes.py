"""Reduce a model's sizes and thresholds for a comparison. Pure.

A threshold is a setting above which a model takes another path: a chunked loss or MLP, gradients in several buckets, a
window shorter than the sequence. The reduced model must still reach these paths.
"""

from __future__ import annotations

import math

from megatron_cp.config.run_config import DistributedDataParallelConfig, ModelConfig
from megatron_cp.models.hybrid_pattern import layers_of, mtp_layers_of
from megatron_cp.models.layers.mamba.shape import MambaShape

HIDDEN, HEAD_DIM, FFN = 64, 16, 32
# Gradient elements per bucket: about one layer of the smallest model.
BUCKET = 8192
# Chunks of a rank's tokens for the loss and the MLP; the last one is shorter.
PIECES = 3


def shrink_thresholds(
    model: ModelConfig, ddp: DistributedDataParallelConfig, micro_batch_size: int, before: int, length: int
) -> None:
    """Shrink thresholds; the sequence shrinks from ``before`` to ``length``."""
    packed = model.sequence_packing_scheduler is not None
    parts = model.tensor_model_parallel_size if model.sequence_parallel else 1
    ddp.bucket_size = BUCKET
    if packed and model.max_seqlen_per_dp_cp_rank is not None:  # the longest sample needs as many ranks as before
        ranks = -(-before // model.max_seqlen_per_dp_cp_rank)
        model.max_seqlen_per_dp_cp_rank = -(-length // (ranks * 2 * parts)) * 2 * parts
    if model.window_size is not None:
        most = length // (32 if packed else 4)  # half of the average packed sample; otherwise a quarter
        model.window_size = [min(side, most) for side in model.window_size]
    tokens = model.max_seqlen_per_dp_cp_rank if packed else length // model.context_parallel_size
    positions, rows = (tokens or 1) // parts, 1 if packed else micro_batch_size
    piece = max(1, -(-positions // PIECES)) * rows * parts
    if model.cross_entropy_chunk_size is not None:
        model.cross_entropy_chunk_size = piece
    if model.mlp_chunk_size is not None:
        model.mlp_chunk_size = piece


def row_of_all_types(pattern: str, layers: int) -> str | None:
    """Return the first ``layers`` consecutive hybrid layers that include every type.

    Returns "" for other models, None if there is no such row.
    """
    own = layers_of(pattern)
    rows = (own[first : first + layers] for first in range(max(1, len(own) - layers + 1)))
    return next((row for row in rows if set(row) == set(own)), None)


def shrink(model: ModelConfig, tp: int, num_layers: int) -> None:
    """Shrink widths and layers, in place, to sizes that ``tp`` divides."""
    if model.architecture == "hybrid":
        if num_layers < model.num_layers:
            row = row_of_all_types(model.hybrid_layer_pattern or "", num_layers) or ""
            model.hybrid_layer_pattern = "/".join([row, *mtp_layers_of(model.hybrid_layer_pattern)])
        model.mamba_num_heads = MambaShape.of(model).heads
        model.mamba_head_dim = model.mamba_state_dim = 8
    if isinstance(model.moe_layer_freq, list) and len(model.moe_layer_freq) > num_layers:
        model.moe_layer_freq = [0] + [1] * (num_layers - 1)
    model.num_layers = num_layers
    model.hidden_size, model.kv_channels = HIDDEN, HEAD_DIM
    model.ffn_hidden_size = math.lcm(FFN, tp)
    if model.num_moe_experts is not None:
        model.moe_ffn_hidden_size = math.lcm(FFN, tp)
        model.moe_latent_size = None if model.moe_latent_size is None else HIDDEN // 2
        if model.moe_shared_expert_intermediate_size is not None:
            model.moe_shared_expert_intermediate_size = math.lcm(FFN, tp)
    if model.multi_latent_attention:
        model.q_lora_rank = None if model.q_lora_rank is None else math.lcm(16, tp)
        model.kv_lora_rank = math.lcm(24, tp) - 8  # plus the rotated dimensions: a multiple
        model.qk_head_dim = model.qk_pos_emb_head_dim = model.v_head_dim = 8
    rotated_of = model.qk_pos_emb_head_dim if model.multi_latent_attention else HEAD_DIM
    pairs = int(rotated_of * model.rotary_percent) // 2  # about the configured rotary share
    model.rotary_percent = 2 * max(1, pairs) / rotated_of
