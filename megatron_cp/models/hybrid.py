"""Hybrid models: megatron-core's stack with our attention, mixer and router."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cp.models.build import Build
from megatron_cp.models.hybrid_pattern import with_stages
from megatron_cp.models.language_model import LanguageModelMixin
from megatron_cp.models.layer_specs import gpt_layer_spec
from megatron_cp.models.layers.mamba.mixer import ContextParallelMambaMixer, SeededMambaLayer
from megatron_cp.models.layers.mtp import mtp_block_spec
from megatron_cp.models.layers.router import shard_padding_mask


class HybridLayers(HybridStack):
    """megatron-core's stack with a given last norm.

    Under sequence parallelism each tensor-parallel rank has its own dropout, as in megatron-core's GPT models.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *args: Any,
        final_norm: Any,
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # The ranks hold different tokens; upstream's stack would drop the same units on each rank.
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            return super().forward(*args, **kwargs)


class HybridLanguageModel(LanguageModelMixin, HybridModel):
    """megatron-core's hybrid model with the last stage of :class:`LanguageModelMixin`."""

    post_process: bool
    mtp_process: bool

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if hasattr(self, "rotary_pos_emb"):
            # Upstream sets this in GPT models only. Angles of halves applied to neighbouring pairs are no rotation.
            self.rotary_pos_emb.rotary_interleaved = config.rotary_interleaved

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states ``[s, b, h]``; on the last stage its output."""
        layer_inputs = {"packed_seq_params": packed_seq_params}
        layer_inputs["padding_mask"] = shard_padding_mask(padding_mask, self.config, self.pg_collection)
        last, predicts = self.post_process, self.mtp_process
        self.post_process = self.mtp_process = False  # so that upstream returns the hidden states
        try:
            hidden_states = super().forward(input_ids, position_ids, attention_mask, decoder_input, **layer_inputs)
        finally:
            self.post_process, self.mtp_process = last, predicts
        if not last:
            return hidden_states
        return self.compute_output(
            hidden_states,
            labels,
            loss_mask,
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            rotary_pos_emb=self._rotary_positions(hidden_states, packed_seq_params),
            **layer_inputs,
        )

    def _rotary_positions(self, hidden_states: Tensor, packed: PackedSeqParams | None) -> Tensor | None:
        """Return the layers' rotary positions, for multi-token prediction."""
        if not (self.mtp_process and hasattr(self, "rotary_pos_emb")):
            return None
        length = self.rotary_pos_emb.get_rotary_seq_len(None, self.decoder, hidden_states, self.config, packed)
        return self.rotary_pos_emb(length, packed_seq=packed is not None)


def build_hybrid(build: Build, **common: Any) -> HybridLanguageModel:
    """Build this rank's chunk; ``common``: arguments of all language models."""
    model = build.model
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    pattern = with_stages(model.hybrid_layer_pattern or "", stages)
    if not common["post_process"]:  # upstream reads from the global state which stage predicts more tokens
        pattern = pattern.split("/")[0]
    return HybridLanguageModel(
        config=build.core_config,
        hybrid_stack_spec=hybrid_stack_spec(build),
        hybrid_layer_pattern=pattern,
        **common,
    )


def hybrid_stack_spec(build: Build) -> ModuleSpec:
    """Build the stack's spec; attention, MLP, experts are halves of GPT layers."""
    dense = gpt_layer_spec(build, experts=False)
    layers: dict[str, Any] = {
        "attention_layer": _without(dense, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp),
        "mlp_layer": _without_attention(dense),
        "mamba_layer": ModuleSpec(
            module=SeededMambaLayer, submodules=_mamba_submodules(build), params={"initialization_seed": build.seed}
        ),
    }
    if "E" in build.model.layer_letters:
        layers["moe_layer"] = _without_attention(gpt_layer_spec(build, experts=True))
    if build.model.mtp_num_layers:
        layers["mtp_block_spec"] = mtp_block_spec(build, None)
    submodules = HybridStackSubmodules(**layers)
    return ModuleSpec(module=HybridLayers, submodules=submodules, params={"final_norm": build.norm})


def _without_attention(layer: ModuleSpec) -> ModuleSpec:
    return _without(layer, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)


def _without(layer: ModuleSpec, **left_out: Any) -> ModuleSpec:
    return ModuleSpec(module=layer.module, params=layer.params, submodules=replace(layer.submodules, **left_out))


def _mamba_submodules(build: Build) -> MambaLayerSubmodules:
    norm: Any = build.norm
    if build.with_te:
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

        linears = MambaMixerSubmodules(in_proj=TELayerNormColumnParallelLinear, out_proj=TERowParallelLinear)
        norm, renamed = IdentityOp, {}
    else:
        linears = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
        renamed = {"norm.": "mixer.in_proj.layer_norm_"}  # the name in checkpoints of Transformer Engine's layers
    return MambaLayerSubmodules(
        norm=norm,
        mixer=ModuleSpec(module=ContextParallelMambaMixer, submodules=linears),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=renamed,
    )
