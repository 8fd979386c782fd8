"""megatron-core's latent attention, corrected to equal a single rank's."""

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
    """Latent attention that is correct under tensor parallelism.

    All heads share the rotary part of the keys, so its gradient is summed over the ranks of the heads. Upstream
    (0.19.2) does so only with Transformer Engine's layers and sequence parallelism.

    If queries are not compressed (DeepSeek-V2-Lite), ``qk_layernorm`` normalizes the compressed keys and values only.
    Upstream normalizes the layer's input again in Transformer Engine's layers, and refuses the setting in its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            # Upstream sums these gradients, as it does for a norm of this rank's heads with the same name.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            name_tensor_parallel_group(getattr(self, name, None), self.tp_group)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        resolver = QKNormConfigResolver(self.config, submodules)
        if self.config.q_lora_rank is not None:
            return resolver.resolve()
        resolver.has_q_lora = True  # the norm of compressed queries that it then finds is not built
        return resolver.resolve() | {"linear_q_proj": submodules.linear_q_proj}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return compressed queries, and compressed keys and values.

        Queries: ``[s, b, q_lora_rank]``, or the input if they are not compressed. Keys and values, with the shared part
        of the keys: ``[s, b, kv_lora_rank + qk_pos_emb_head_dim]``.
        """
        config, queries = self.config, hidden_states
        if config.q_lora_rank is not None:
            queries = self._gather_columns(self.linear_q_down_proj(hidden_states)[0], config.q_lora_rank)
        widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        keys = self._gather_columns(self.linear_kv_down_proj(hidden_states)[0], sum(widths))
        if self.tp_group.size() > 1 and not config.sequence_parallel:  # else upstream sums when it gathers tokens
            compressed, shared = keys.split(widths, dim=-1)
            keys = torch.cat([compressed, copy_to_tensor_model_parallel_region(shared, self.tp_group)], dim=-1)
        return queries, keys

    def _gather_columns(self, part: Tensor, width: int) -> Tensor:
        """Gather columns that megatron-core's layers split."""
        if part.size(-1) == width:
            return part
        whole = gather_from_tensor_model_parallel_region(part, self.tp_group)
        return scatter_to_sequence_parallel_region(whole, self.tp_group) if self.config.sequence_parallel else whole


def patch(attention: ModuleSpec, tensor_parallel: ProcessGroup) -> None:
    """Change a latent attention's spec in place."""
    attention.module = LatentAttention
    # Upstream builds this projection without a group, which would read the global state.
    projection = attention.submodules.linear_q_proj
    attention.submodules.linear_q_proj = ModuleSpec(projection, params={"tp_group": tensor_parallel})
