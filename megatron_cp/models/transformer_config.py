"""From a run's configuration to megatron-core's ``TransformerConfig``."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_cp.config.run_config import MixedPrecisionConfig, ModelConfig
from megatron_cp.config.setting import passed_on
from megatron_cp.models.fusions import fused_loss, fuses_rotary_embedding, groups_experts
from megatron_cp.models.layer_specs import use_te_layers

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
    "fast_gelu": partial(F.gelu, approximate="tanh"),  # upstream's function of this name rounds after each operation
}


def params_dtype(precision: MixedPrecisionConfig) -> torch.dtype:
    """The dtype of the model's parameters: bf16 on GPUs and fp32 elsewhere unless ``mixed_precision`` says."""
    if precision.bf16:
        return torch.bfloat16
    if precision.fp16:
        return torch.float16
    if precision.fp32 or not torch.cuda.is_available():
        return torch.float32
    return torch.bfloat16


def transformer_config(
    model: ModelConfig, precision: MixedPrecisionConfig, eval_context_parallel_size: int | None = None
) -> TransformerConfig:
    """megatron-core's configuration of a finalized run configuration."""
    config_class = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    dtype = params_dtype(precision)
    on_gpu, te_layers = torch.cuda.is_available(), use_te_layers(model, precision.fp32)
    loss = fused_loss(model, te_layers)
    with_experts = [int("E" in parts) for parts in model.layer_types]
    biased_experts = model.add_bias_linear and model.num_moe_experts is not None
    bent = bool(model.glu_linear_offset) or model.activation_func_clamp_value is not None
    parallel, interleaved = model.context_parallel_size > 1, model.virtual_pipeline_model_parallel_size is not None
    # Microbatches may be sliced where the model is not.
    grouped = parallel or model.dynamic_context_parallel or eval_context_parallel_size is not None
    built = config_class(
        **passed_on(model, [field.name for field in fields(config_class)]),
        **(_latent_positions(model) if model.multi_latent_attention else {}),
        activation_func=_ACTIVATIONS[model.activation_func],
        # Upstream tells Transformer Engine this number, and latent attention's own size on a rank depends on it.
        num_query_groups=model.kv_heads,
        window_size=tuple(model.window_size) if model.window_size else None,
        cp_comm_type=model.cp_comm_type if grouped else None,
        hierarchical_context_parallel_sizes=model.hierarchical_context_parallel_sizes if parallel else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        transformer_impl="transformer_engine" if te_layers else "local",  # what the layer specs go by
        use_cpu_initialization=model.use_cpu_initialization or not on_gpu,
        # Without either it is one addition, which a compiled function only takes longer to launch.
        # Upstream's grouped experts with biases refuse it.
        bias_dropout_fusion=on_gpu and (model.hidden_dropout > 0 or model.add_bias_linear) and not biased_experts,
        # Plain SwiGLU only: the other fused functions refuse some models, or approximate what a CPU computes exactly.
        bias_activation_fusion=on_gpu and model.activation_func == "silu" and model.gated_linear_unit and not bent,
        apply_rope_fusion=fuses_rotary_embedding(model, te_layers),
        cross_entropy_loss_fusion=loss is not None,
        cross_entropy_fusion_impl=loss or "native",
        # megatron-core's own output layer would ask for apex; the builder tells Transformer Engine's layers.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        # megatron-core asks for pre-softmax where it is 1, experts or not.
        moe_router_topk=model.moe_router_topk if model.num_moe_experts is not None else 2,
        moe_z_loss_coeff=model.moe_z_loss_coeff or None,  # upstream would report 0 / 0
        moe_grouped_gemm=groups_experts(model, te_layers),
        # Otherwise Transformer Engine's layers write the first weight gradient of their lives over what is there: that
        # of a layer's second use, where several depths of multi-token prediction share one.
        disable_parameter_transpose_cache=True,
        variable_seq_lengths=model.sequence_packing_scheduler is not None or eval_context_parallel_size is not None,
        # Batched point-to-point calls confuse the interleaved schedule's messages: silently wrong losses.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved and model.overlap_p2p_comm is not False,
        # Upstream has the host wait for the device after each batch, for PyTorch before 1.13 (its PR 82450): there
        # ``wait`` did not wait for a batch. Since then a batch's event is recorded once all of it is launched.
        batch_p2p_sync=False,
        # What a stage has sent is needed by none of its own kernels any more.
        deallocate_pipeline_outputs=model.pipeline_model_parallel_size > 1,
        attention_softmax_in_fp32=True,
        is_hybrid_model=model.architecture == "hybrid",
        # Any other value than 1 makes megatron-core save each layer under a name of its own.
        moe_layer_freq=with_experts if len(set(with_experts)) > 1 else 1,
    )
    if model.position_embedding_type == "yarn" and not model.multi_latent_attention:
        # No fields of megatron-core's: its attention takes the concentration factor from a configuration that has them.
        built.yarn_rotary_scaling_factor = model.yarn_rotary_scaling_factor
        built.yarn_mscale, built.yarn_mscale_all_dim = model.yarn_mscale, model.yarn_mscale_all_dim
    return built


def _latent_positions(model: ModelConfig) -> dict[str, Any]:
    """Positions as megatron-core's latent attention is told of them: each of its layers has its own.

    There ``mscale_all_dim`` also sharpens the scores, by the square of its part of the concentration factor.
    """
    rotary = {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
    if model.position_embedding_type != "yarn":
        return rotary | {"rope_type": "rope"}
    scales = (model.yarn_mscale, model.yarn_mscale_all_dim)
    mscale, mscale_all_dim = scales if None not in scales else (1.0, 0.0)
    same = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    yarn = {name: getattr(model, f"yarn_{name}") for name in same}
    return rotary | yarn | {"rope_type": "yarn", "mscale": mscale, "mscale_all_dim": mscale_all_dim}
