"""Layer specs: megatron-core's own, changed by a list of transforms."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from importlib import metadata

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.attention.modules.native import ContextParallelAttention
from megatron_cp.attention.modules.te import have_transformer_engine, te_attention_class
from megatron_cp.attention.modules.te_support import choose_backend, has_te_layers
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.build import Build, uses_te_layers
from megatron_cp.models.layers import latent_attention
from megatron_cp.models.layers.experts import BiasedExpertOutput, LatentMoELayer
from megatron_cp.models.layers.head_groups.attention import HeadGroupsAttention
from megatron_cp.models.layers.head_groups.projections import OutputByGroups, ProjectionByGroups
from megatron_cp.models.layers.norms import NormThenAdd, TorchNorm
from megatron_cp.models.layers.router import PackedRouter
from megatron_cp.models.layers.transformer import SeededTransformerLayer
from megatron_cp.models.local_rotary import LocalRotaryAttention, LocalRotaryByHeadGroups


def use_te_layers(model: ModelConfig, fp32: bool) -> bool:
    """Return whether the layers around attention should be Transformer Engine's.

    Called once a model; megatron-core's configuration stores the answer (:func:`uses_te_layers`).
    """
    return has_te_layers(model, _te_version(), torch.cuda.is_available(), fp32=fp32)


def choose_attention(
    model: ModelConfig, core_config: TransformerConfig, packed_sizes: Collection[int], fp32: bool
) -> type:
    """Choose the attention class: Transformer Engine's or ours.

    Transformer Engine's attention needs Transformer Engine's layers. ``model.attention_backend`` can choose ours.
    ``packed_sizes``: sizes of the groups for packed batches.
    """
    if not uses_te_layers(core_config):
        return ContextParallelAttention
    flash = any(metadata.distributions(name="flash-attn"))
    backend, _ = choose_backend(model, _te_version(), True, packed_sizes, fp32=fp32, flash=flash)
    return te_attention_class() if backend == "te" else ContextParallelAttention


def _te_version() -> str | None:
    return metadata.version("transformer-engine") if have_transformer_engine() else None


def gpt_layer_spec(build: Build, experts: bool) -> ModuleSpec:
    """Build the spec of one layer of a GPT model: attention, and an MLP or experts."""
    model = build.model
    layer = (get_gpt_layer_with_transformer_engine_spec if build.with_te else get_gpt_layer_local_spec)(
        num_experts=model.num_moe_experts if experts else None,
        moe_grouped_gemm=build.core_config.moe_grouped_gemm,
        qk_layernorm=model.qk_layernorm,
        qk_l2_norm=model.qk_l2_norm,
        multi_latent_attention=model.multi_latent_attention,
        **({} if build.with_te else {"normalization": model.normalization}),
    )
    for transform in LAYER_TRANSFORMS:
        transform(layer, build, experts)
    return layer


def with_our_attention(layer: ModuleSpec, build: Build, experts: bool) -> None:
    attention = layer.submodules.self_attention
    attention.params["attn_mask_type"] = AttnMaskType[build.model.attention_mask_type]
    attention.submodules.core_attention = build.core_attention


def with_local_rotary(layer: ModuleSpec, build: Build, experts: bool) -> None:
    if build.model.has_local_rotary:
        grouped = build.model.attention_head_groups > 1
        layer.submodules.self_attention.module = LocalRotaryByHeadGroups if grouped else LocalRotaryAttention


def with_head_groups(layer: ModuleSpec, build: Build, experts: bool) -> None:
    if build.model.attention_head_groups > 1:
        attention = layer.submodules.self_attention
        if not build.model.has_local_rotary:
            attention.module = HeadGroupsAttention
        attention.params["head_groups"] = build.model.attention_head_groups
        attention.params["overlap"] = build.model.overlap_head_groups
        attention.submodules.linear_qkv = ProjectionByGroups
        attention.submodules.linear_proj = OutputByGroups
        if build.with_te:  # its projection has the norm inside; in checkpoints the norm keeps that name
            layer.submodules.input_layernorm = build.norm
            layer.submodules.sharded_state_dict_keys_map = (
                layer.submodules.sharded_state_dict_keys_map | _ATTENTION_NORM
            )


def with_latent_attention(layer: ModuleSpec, build: Build, experts: bool) -> None:
    if build.model.multi_latent_attention:
        latent_attention.patch(layer.submodules.self_attention, build.groups.tp)


def with_packed_routers(layer: ModuleSpec, build: Build, experts: bool) -> None:
    if experts:
        layer.submodules.mlp.keywords["submodules"].router = PackedRouter


def with_biased_experts(layer: ModuleSpec, build: Build, experts: bool) -> None:
    if experts and build.model.add_bias_linear and not build.with_te:
        parts = layer.submodules.mlp.keywords["submodules"]
        parts.experts.keywords["submodules"].linear_fc2 = BiasedExpertOutput


def with_latent_experts(layer: ModuleSpec, build: Build, experts: bool) -> None:
    if experts and build.model.moe_latent_size is not None:
        layer.submodules.mlp = partial(LatentMoELayer, **layer.submodules.mlp.keywords)


def with_torch_norms(layer: ModuleSpec, build: Build, experts: bool) -> None:
    if build.with_te:
        return
    layer.submodules.sharded_state_dict_keys_map = _saved_names(build.model, experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    parts = layer.submodules.self_attention.submodules
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(parts, name, IdentityOp) not in (None, IdentityOp, L2Norm):
            setattr(parts, name, TorchNorm)


def with_norms_after(layer: ModuleSpec, build: Build, experts: bool) -> None:
    """Normalize the outputs of attention and MLP before they are added, as Gemma does."""
    if build.model.sandwich_norm:
        add = ModuleSpec(NormThenAdd, params={"config": build.core_config, "norm": build.norm})
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add


def with_seeded_weights(layer: ModuleSpec, build: Build, experts: bool) -> None:
    layer.module = SeededTransformerLayer
    layer.params = {"initialization_seed": build.seed}


# Each changes a layer's spec in place; their order does not matter.
LAYER_TRANSFORMS = (
    with_our_attention,
    with_local_rotary,
    with_head_groups,
    with_latent_attention,
    with_packed_routers,
    with_biased_experts,
    with_latent_experts,
    with_torch_norms,
    with_norms_after,
    with_seeded_weights,
)


_ATTENTION_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _saved_names(model: ModelConfig, experts: bool) -> dict[str, str]:
    """Map the local layers' norms to names in checkpoints.

    The names are those of Transformer Engine's layers, whose norms are parts of the matrices after them. Upstream's
    local specs map dense layers only, so runs with experts or latent attention could not resume with the other kind.
    """
    names: dict[str, str] = {}
    if not experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    if not model.multi_latent_attention:
        names |= _ATTENTION_NORM
    elif model.qk_layernorm:
        if model.q_lora_rank is not None:
            names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    return names


def gpt_block_spec(build: Build, vp_stage: int | None) -> tuple[TransformerBlockSubmodules, ModuleSpec]:
    """Build the specs of this rank's stage and of the model's last layer.

    Multi-token prediction repeats the last layer, also on a stage without layers.
    """
    layer_types, stage = build.model.layer_types, build.groups.pp.rank()
    specs = {parts: gpt_layer_spec(build, experts="E" in parts) for parts in set(layer_types)}
    layers = [specs[parts] for parts in layer_types]
    first = get_transformer_layer_offset(build.core_config, vp_stage, stage)
    count = get_num_layers_to_build(build.core_config, vp_stage, stage)
    return TransformerBlockSubmodules(layer_specs=layers[first : first + count], layer_norm=build.norm), layers[-1]
