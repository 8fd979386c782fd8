"""Layer specs: megatron-core's own, with our core attention in its slot."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from importlib import metadata
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
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
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_cp.attention.modules.native import ContextParallelAttention
from megatron_cp.attention.modules.te import have_transformer_engine, te_attention_class
from megatron_cp.attention.modules.te_support import choose_backend, has_its_layers
from megatron_cp.config.run_config import ModelConfig
from megatron_cp.dynamic_cp.runtime.active_group import active_group
from megatron_cp.models.initial_weights import draw_layer, drawing_from, seed_of
from megatron_cp.models.layers import latent_attention
from megatron_cp.models.layers.experts import BiasedExpertOutput, LatentMoELayer
from megatron_cp.models.layers.norms import NormThenAdd, TorchNorm
from megatron_cp.models.layers.router import PackRouter, routers_of
from megatron_cp.models.local_rotary import LocalRotaryAttention


class SeededTransformerLayer(TransformerLayer):
    """A layer whose initial weights depend on the seed and its global number, not on the pipeline stage it is on.

    So that the same seed gives the same model under every layout. (Under tensor parallelism megatron-core itself draws
    the whole weight and keeps a slice, with ``use_cpu_initialization``.)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        initialization_seed: int,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        **kwargs: Any,
    ) -> None:
        number = layer_number
        if kwargs.get("is_mtp_layer"):
            number += config.num_layers
        elif kwargs.get("add_layer_offset", True):
            number += get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        with drawing_from(seed_of(initialization_seed, f"layer {number}")):
            super().__init__(
                config, *args, layer_number=layer_number, pg_collection=pg_collection, vp_stage=vp_stage, **kwargs
            )
        draw_layer(self, initialization_seed, f"layer {number}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Also when recomputed during the backward pass: the arguments, and so the microbatch's group, are kept.
        with active_group(self.pg_collection, kwargs.get("packed_seq_params"), *routers_of(self)):
            return super().forward(*args, **kwargs)


def use_its_layers(model: ModelConfig, fp32: bool) -> bool:
    """Whether the layers around attention are to be Transformer Engine's. Asked once a model: :func:`its_layers` tells
    the answer."""
    return has_its_layers(model, _its_version(), torch.cuda.is_available(), fp32=fp32)


def its_layers(core_config: TransformerConfig) -> bool:
    """Whether a model's layers are Transformer Engine's."""
    return core_config.transformer_impl == "transformer_engine"


def choose_attention(
    model: ModelConfig, core_config: TransformerConfig, packed_sizes: Collection[int], fp32: bool
) -> type:
    """Transformer Engine's attention where the layers are its own and it can do what is asked, unless the recipe says
    otherwise; else ours. ``packed_sizes`` are the ranks of the groups that packs may use."""
    if not its_layers(core_config):
        return ContextParallelAttention
    flash = any(metadata.distributions(name="flash-attn"))
    backend, _ = choose_backend(model, _its_version(), True, packed_sizes, fp32=fp32, flash=flash)
    return te_attention_class() if backend == "te" else ContextParallelAttention


def _its_version() -> str | None:
    return metadata.version("transformer-engine") if have_transformer_engine() else None


def gpt_layer_spec(
    model: ModelConfig, core_config: TransformerConfig, seed: int, core_attention: type, experts: bool
) -> tuple[ModuleSpec, Any]:
    """The spec of one layer of a GPT/Llama-like model, attention and MLP or experts, and the class of its norms."""
    with_te = its_layers(core_config)
    layer = (get_gpt_layer_with_transformer_engine_spec if with_te else get_gpt_layer_local_spec)(
        num_experts=model.num_moe_experts if experts else None,
        moe_grouped_gemm=core_config.moe_grouped_gemm,
        qk_layernorm=model.qk_layernorm,
        qk_l2_norm=model.qk_l2_norm,
        multi_latent_attention=model.multi_latent_attention,
        **({} if with_te else {"normalization": model.normalization}),
    )
    if experts:
        parts = layer.submodules.mlp.keywords["submodules"]
        parts.router = PackRouter
        if model.add_bias_linear and not with_te:
            parts.experts.keywords["submodules"].linear_fc2 = BiasedExpertOutput
        if model.moe_latent_size is not None:
            layer.submodules.mlp = partial(LatentMoELayer, **layer.submodules.mlp.keywords)
    attention = layer.submodules.self_attention
    attention.params["attn_mask_type"] = AttnMaskType[model.attention_mask_type]
    if model.has_local_rotary:
        attention.module = LocalRotaryAttention
    attention.submodules.core_attention = core_attention
    if with_te:
        from megatron.core.extensions.transformer_engine import TENorm

        norm: Any = TENorm
    else:
        norm = TorchNorm
        layer.submodules.sharded_state_dict_keys_map = _saved_names(model, experts)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention.submodules, name, IdentityOp) not in (None, IdentityOp, L2Norm):
                setattr(attention.submodules, name, TorchNorm)
    if model.sandwich_norm:
        add = ModuleSpec(NormThenAdd, params={"config": core_config, "norm": norm})
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
    seeded = ModuleSpec(
        module=SeededTransformerLayer,
        submodules=layer.submodules,
        params={"initialization_seed": seed},
    )
    return seeded, norm


def _saved_names(model: ModelConfig, experts: bool) -> dict[str, str]:
    """How checkpoints call the norms of layers without Transformer Engine: as those of its layers are saved, which are
    parts of the matrices that follow. Upstream's local specs say it of dense layers only, not of experts or latent
    attention, so that a run could not go on with the other kind of layers."""
    names = {}
    if not experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    if not model.multi_latent_attention:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    elif model.qk_layernorm:
        if model.q_lora_rank is not None:
            names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    return names


def gpt_block_spec(
    model: ModelConfig,
    core_config: TransformerConfig,
    groups: ProcessGroupCollection,
    vp_stage: int | None,
    seed: int,
    core_attention: type,
) -> tuple[TransformerBlockSubmodules, ModuleSpec]:
    """The spec of this rank's (virtual) pipeline stage of a GPT/Llama-like model, and that of the model's last layer,
    which multi-token prediction repeats: a stage that holds the embedding or the loss alone has none."""
    specs = {
        parts: gpt_layer_spec(model, core_config, seed, core_attention, experts="E" in parts)
        for parts in set(model.layer_parts)
    }
    layers = [specs[parts][0] for parts in model.layer_parts]
    last, norm = specs[model.layer_parts[-1]]
    for layer, _ in specs.values() if model.multi_latent_attention else []:
        latent_attention.mend(layer.submodules.self_attention, groups.tp)
    first = get_transformer_layer_offset(core_config, vp_stage, groups.pp.rank())
    count = get_num_layers_to_build(core_config, vp_stage, groups.pp.rank())
    return TransformerBlockSubmodules(layer_specs=layers[first : first + count], layer_norm=norm), last
