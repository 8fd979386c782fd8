"""Transformer layer with seeded weights that uses each microbatch's groups."""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import get_transformer_layer_offset
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_cp.dynamic_cp.runtime.active_group import active_group
from megatron_cp.models.initial_weights import draw_layer, drawing_from, seed_of
from megatron_cp.models.layers.head_groups.attention import HeadGroupsAttention


class SeededTransformerLayer(TransformerLayer):
    """Layer whose initial weights depend on the seed and its global number only.

    So the same seed gives the same model under every layout. (Under tensor parallelism megatron-core draws the whole
    weight and keeps a slice, with ``use_cpu_initialization``.)
    """

    norm_in_mlp = False  # the MLP, in tiles, normalizes its own input (mlp/tiles.py)

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
        if isinstance(self.self_attention, HeadGroupsAttention):
            self.self_attention.take_norm(self.input_layernorm)
            self.recompute_input_layernorm = False  # it has no output to drop
        draw_layer(self, initialization_seed, f"layer {number}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Also in recomputation: the arguments, and so the microbatch's group, are kept.
        packed = kwargs.get("packed_seq_params")
        if packed is None:
            return super().forward(*args, **kwargs)
        routers = [self.mlp.router] if hasattr(self.mlp, "router") else []
        with active_group(self.pg_collection, packed, *routers):
            return super().forward(*args, **kwargs)

    def _forward_pre_mlp_layernorm(self, hidden_states: Tensor) -> Any:
        return hidden_states if self.norm_in_mlp else super()._forward_pre_mlp_layernorm(hidden_states)
