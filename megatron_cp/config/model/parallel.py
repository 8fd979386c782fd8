"""Tensor, pipeline, expert and sequence parallelism"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.model.experts import EXPERTS
from megatron_cp.config.setting import LAYOUT, given, setting, size

VIRTUAL = given("model.virtual_pipeline_model_parallel_size", 2)


@dataclass
class Parallel:
    tensor_model_parallel_size: int = size(
        1, "tp: ranks that share each layer", LAYOUT, flags="-tp --tensor_model_parallel_size"
    )
    pipeline_model_parallel_size: int = size(
        1, "pp: pipeline stages", LAYOUT, flags="-pp --pipeline_model_parallel_size"
    )
    virtual_pipeline_model_parallel_size: int | None = size(
        None, "vpp: virtual stages per pipeline stage", LAYOUT, flags="-vp --virtual_pipeline_model_parallel_size"
    )
    expert_model_parallel_size: int = size(
        1, "ep: ranks that divide the experts", LAYOUT, flags="-ep --expert_model_parallel_size"
    )
    expert_tensor_parallel_size: int | None = size(
        None,
        "etp: ranks that share each expert; null: tp",
        LAYOUT,
        when=EXPERTS,
        flags="-etp --expert_tensor_parallel_size",
    )
    sequence_parallel: bool = setting(False, "divide the sequence over tp ranks outside attention and MLP", LAYOUT)
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "count the embedding as a layer when layers are divided over stages", LAYOUT
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "count the loss as a layer when layers are divided over stages", LAYOUT
    )
    num_layers_in_first_pipeline_stage: int | None = size(
        None, "layers of the first stage; the middle stages divide the rest", LAYOUT
    )
    num_layers_in_last_pipeline_stage: int | None = size(None, "layers of the last stage", LAYOUT)
    microbatch_group_size_per_vp_stage: int | None = setting(
        None, "microbatches that a virtual stage runs in a row; null: pp", LAYOUT, when=VIRTUAL
    )
    overlap_p2p_comm: bool | None = setting(
        None,
        "overlap messages between stages with compute; null: with virtual stages",
        LAYOUT,
        when=VIRTUAL,
        translated=True,
    )
