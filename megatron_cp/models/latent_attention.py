"""Latent attention whose queries are not compressed, as in DeepSeek-V2-Lite."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.distributed import ProcessGroup


class PlainQueries(MLASelfAttention):
    """Of which ``qk_layernorm`` normalizes the compressed keys and values alone.

    Upstream (0.19.2) would normalize the layer's input again, before the queries' projection, in Transformer Engine's
    layers, and refuses the setting in its own.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        resolver = QKNormConfigResolver(self.config, submodules)
        resolver.has_q_lora = True  # what it then finds for the compressed queries is not built
        return resolver.resolve() | {"linear_q_proj": submodules.linear_q_proj}


def leave_queries_plain(attention: ModuleSpec, tensor_parallel: ProcessGroup) -> None:
    """Change the spec of a model's latent attention, in place, to :class:`PlainQueries`."""
    attention.module = PlainQueries
    # The one projection that upstream builds without its group, so that it would ask the global state.
    projection = attention.submodules.linear_q_proj
    attention.submodules.linear_q_proj = ModuleSpec(projection, params={"tp_group": tensor_parallel})
