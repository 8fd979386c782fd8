"""megatron-core's latent attention, mended where its layers compute something else than one rank, or refuse."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_cp.mcore.private_names import name_tensor_parallel_group


class LatentAttention(MLASelfAttention):
    """Right under tensor parallelism, in its own layers and in Transformer Engine's, and with plain queries.

    All heads share the part of the keys that rotary embeddings turn, so its gradient is a sum over the ranks that have
    the heads. Upstream (0.19.2) sums it with Transformer Engine's layers and sequence parallelism only.

    Where queries are not compressed (DeepSeek-V2-Lite), ``qk_layernorm`` normalizes the compressed keys and values
    alone. Upstream would normalize the layer's input again, before the queries' projection, in Transformer Engine's
    layers, and refuses the setting in its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            # Upstream takes its gradients, by its name, for those of a norm of this rank's heads alone, and sums them.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            name_tensor_parallel_group(getattr(self, name, None), self.tp_group)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        resolver = QKNormConfigResolver(self.config, submodules)
        if self.config.q_lora_rank is not None:
            return resolver.resolve()
        resolver.has_q_lora = True  # what it then finds for the compressed queries is not built
        return resolver.resolve() | {"linear_q_proj": submodules.linear_q_proj}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed queries ``[s, b, q_lora_rank]`` (plain: the input), and compressed keys and values beside the
        shared part of the keys ``[s, b, kv_lora_rank + qk_pos_emb_head_dim]``, of this rank's tokens."""
        config, queries = self.config, hidden_states
        if config.q_lora_rank is not None:
            queries = self._whole(self.linear_q_down_proj(hidden_states)[0], config.q_lora_rank)
        widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        keys = self._whole(self.linear_kv_down_proj(hidden_states)[0], sum(widths))
        if self.tp_group.size() > 1 and not config.sequence_parallel:  # else the sum is where upstream gathers tokens
            compressed, shared = keys.split(widths, dim=-1)
            keys = torch.cat([compressed, copy_to_tensor_model_parallel_region(shared, self.tp_group)], dim=-1)
        return queries, keys

    def _whole(self, part: Tensor, width: int) -> Tensor:
        """What megatron-core's own layers divide by columns, for all tokens; Transformer Engine's keep it whole."""
        if part.size(-1) == width:
            return part
        whole = gather_from_tensor_model_parallel_region(part, self.tp_group)
        return scatter_to_sequence_parallel_region(whole, self.tp_group) if self.config.sequence_parallel else whole


def patch(attention: ModuleSpec, tensor_parallel: ProcessGroup) -> None:
    """Change the spec of a model's latent attention, in place."""
    attention.module = LatentAttention
    # The one projection that upstream builds without its group, so that it would ask the global state.
    projection = attention.submodules.linear_q_proj
    attention.submodules.linear_q_proj = ModuleSpec(projection, params={"tp_group": tensor_parallel})
