"""Convert a run's configuration to megatron-core's ``TransformerConfig``."""

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
from megatron_cp.models.fusions import fused_loss, fuses_gate, fuses_rotary_embedding, groups_experts
from megatron_cp.models.layer_specs import use_te_layers
from megatron_cp.models.layers.mlp.gated_silu import gated_silu

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
    "fast_gelu": partial(F.gelu, approximate="tanh"),  # upstream's function rounds after each operation
}


def params_dtype(precision: MixedPrecisionConfig) -> torch.dtype:
    """Return the dtype of parameters: as set, else bf16 on GPUs and fp32 on CPUs."""
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
    """Build megatron-core's configuration from a finalized run configuration."""
    config_class = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    dtype = params_dtype(precision)
    on_gpu, te_layers = torch.cuda.is_available(), use_te_layers(model, precision.fp32)
    loss = fused_loss(model, te_layers)
    with_experts = [int("E" in parts) for parts in model.layer_types]
    biased_experts = model.add_bias_linear and model.num_moe_experts is not None
    parallel, interleaved = model.context_parallel_size > 1, model.virtual_pipeline_model_parallel_size is not None
    # Evaluation may use context parallelism if training does not.
    grouped = parallel or model.dynamic_context_parallel or eval_context_parallel_size is not None
    built = config_class(
        **passed_on(model, [field.name for field in fields(config_class)]),
        **(_latent_positions(model) if model.multi_latent_attention else {}),
        activation_func=_ACTIVATIONS[model.activation_func],
        # Transformer Engine and latent attention's size on a rank read this number.
        num_query_groups=model.kv_heads,
        window_size=tuple(model.window_size) if model.window_size else None,
        cp_comm_type=model.cp_comm_type if grouped else None,
        hierarchical_context_parallel_sizes=model.hierarchical_context_parallel_sizes if parallel else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        transformer_impl="transformer_engine" if te_layers else "local",  # read by the layer specs
        use_cpu_initialization=model.use_cpu_initialization or not on_gpu,
        # Without dropout and bias it is one addition, which a compiled function only makes slower.
        # Upstream's grouped experts refuse it with biases.
        bias_dropout_fusion=on_gpu and (model.hidden_dropout > 0 or model.add_bias_linear) and not biased_experts,
        # Plain SwiGLU only: other fused functions refuse some models, or approximate a CPU's exact result.
        bias_activation_fusion=on_gpu and fuses_gate(model),
        apply_rope_fusion=fuses_rotary_embedding(model, te_layers),
        cross_entropy_loss_fusion=loss is not None,
        cross_entropy_fusion_impl=loss or "native",
        # Else megatron-core's output layer requires apex; the builder sets it in Transformer Engine's layers.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        # megatron-core requires pre-softmax if it is 1, also without experts.
        moe_router_topk=model.moe_router_topk if model.num_moe_experts is not None else 2,
        moe_z_loss_coeff=model.moe_z_loss_coeff or None,  # 0 would make upstream report 0 / 0
        moe_grouped_gemm=groups_experts(model, te_layers),
        # Else Transformer Engine's layers overwrite their first weight gradient with that of a second use, when several
        # depths of multi-token prediction share a layer.
        disable_parameter_transpose_cache=True,
        variable_seq_lengths=model.sequence_packing_scheduler is not None or eval_context_parallel_size is not None,
        # With batched calls the interleaved schedule mixes up messages: silently wrong losses.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved and model.overlap_p2p_comm is not False,
        # Upstream's host waits for the device after each batch: before PyTorch 1.13 ``wait`` did not wait for a batch
        # (PyTorch's PR 82450).
        batch_p2p_sync=False,
        # A stage does not use a tensor any more after sending it.
        deallocate_pipeline_outputs=model.pipeline_model_parallel_size > 1,
        attention_softmax_in_fp32=True,
        is_hybrid_model=model.architecture == "hybrid",
        # With any value but 1 megatron-core saves each layer under its own name.
        moe_layer_freq=with_experts if len(set(with_experts)) > 1 else 1,
    )
    if fuses_gate(model) and not (on_gpu or te_layers):
        # With this switch, meant for Transformer Engine's activations, MLPs pass gate and up together to the function.
        # Set afterwards, because upstream's check accepts its own functions only.
        built.use_te_activation_func, built.activation_func = True, gated_silu
    if model.position_embedding_type == "yarn" and not model.multi_latent_attention:
        # Not fields of megatron-core's, whose attention reads the concentration factor from them.
        built.yarn_rotary_scaling_factor = model.yarn_rotary_scaling_factor
        built.yarn_mscale, built.yarn_mscale_all_dim = model.yarn_mscale, model.yarn_mscale_all_dim
    return built


def _latent_positions(model: ModelConfig) -> dict[str, Any]:
    """Return the position settings of megatron-core's latent attention.

    ``mscale_all_dim`` also scales the scores, by the square of its part of the concentration factor.
    """
    rotary = {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
    if model.position_embedding_type != "yarn":
        return rotary | {"rope_type": "rope"}
    scales = (model.yarn_mscale, model.yarn_mscale_all_dim)
    mscale, mscale_all_dim = scales if None not in scales else (1.0, 0.0)
    same = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    yarn = {name: getattr(model, f"yarn_{name}") for name in same}
    return rotary | yarn | {"rope_type": "yarn", "mscale": mscale, "mscale_all_dim": mscale_all_dim}
