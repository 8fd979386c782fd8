"""A configuration without any parallelism, of the same model. Pure."""

from __future__ import annotations

import copy

from megatron_cp.config.run_config import ModelConfig, RunConfig

# Settings that say how a model is divided over ranks, how its memory is saved or with which kernels it is computed, and
# not which model it is.
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_vp_stage",
    "overlap_p2p_comm",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "dynamic_context_parallel",
    "min_dynamic_context_parallel_size",
    "max_seqlen_per_dp_cp_rank",
    "sequence_packing_scheduler",
    "dynamic_context_parallel_calibration_iters",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl",
    "cross_entropy_chunk_size",
    "moe_grouped_gemm",
    "deterministic_mode",
    "attention_backend",
    "transformer_impl",
)


def on_one_rank(config: RunConfig) -> RunConfig:
    """The same model, data and optimizer without any parallelism, by the plainest path there is."""
    config = copy.deepcopy(config)
    defaults, packed = ModelConfig(), config.model.sequence_packing_scheduler is not None
    for name in _LAYOUT:
        setattr(config.model, name, getattr(defaults, name))
    if packed:
        config.model.sequence_packing_scheduler = "dp_balanced"
    config.dist = type(config.dist)(
        attention_probe=False, distributed_timeout_minutes=config.dist.distributed_timeout_minutes
    )
    config.ddp = type(config.ddp)(grad_reduce_in_fp32=config.ddp.grad_reduce_in_fp32)
    config.optimizer.use_distributed_optimizer = False
    return config.finalize()
