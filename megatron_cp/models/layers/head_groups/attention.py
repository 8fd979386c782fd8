"""Self-attention that computes its heads in groups, one after the other.

Queries, keys and values of all heads, and the copies that a transport exchanges, are several times as large as the
layer's input. Here those of one group exist at a time, forward and backward. A group is some key/value heads with their
query heads, or some query heads of one key/value head: then each of its groups projects the keys and values again. What
stays for the backward pass is the layer's input, attention's output, and the log-sum-exp of each query: queries, keys
and values are projected and exchanged again, but attention is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_cp.attention.heads import sharing_groups
from megatron_cp.attention.stages import StagedAttention
from megatron_cp.config.names import NAME
from megatron_cp.mcore.private_names import rotary_scale
from megatron_cp.models.layers.head_groups.groups import Groups
from megatron_cp.models.layers.head_groups.projections import OutputByGroups, ProjectionByGroups


class HeadGroupsAttention(SelfAttention):
    """Self-attention by ``head_groups`` groups of heads, with or without ``overlap``.

    For training and evaluation with this project's core attention. :meth:`take_norm` is called before with the layer's
    norm, a module of its own: the input is the layer's.
    """

    linear_qkv: ProjectionByGroups
    linear_proj: OutputByGroups

    def __init__(self, *args: Any, head_groups: int, overlap: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_groups, self.overlap = head_groups, overlap

    def take_norm(self, norm: torch.nn.Module) -> None:
        """Compute ``norm`` in pieces; its own call then returns the input.

        That call is still needed: the distributed optimizer may still gather its weights.
        """
        self._norm = norm.forward, tuple(norm.parameters())
        norm.forward = _unchanged

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [s, b, h] to the output and bias of ``linear_proj``.

        Raises ValueError for upstream's arguments of inference.
        """
        if given := [name for name, value in unused.items() if value is not None]:
            setting = NAME.model.attention_head_groups
            raise ValueError(f"{setting}={self.head_groups}: no inference with {given}. Fix: {setting}=1")
        angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple | None) else (rotary_pos_emb, rotary_pos_emb)
        if (skipped := self.config.no_rope_freq) and skipped[self.layer_number - 1]:
            angles = None
        cp_group = self.pg_collection.cp  # a microbatch's own, which is no longer set in the backward pass
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"

        def attend(tensors: list[Tensor], group: int) -> StagedAttention:
            query, key, value = tensors
            if self.q_layernorm is not None:
                query = self.q_layernorm(query)
            if self.k_layernorm is not None:
                key = self.k_layernorm(key)
            if packed:
                query, key, value = (x.squeeze(1) for x in (query, key, value))
            if angles is not None:
                query, key = self._rotate((query, key), angles, packed_seq_params if packed else None, cp_group)
            heads = query.shape[-2]
            return self.core_attention(
                *(query, key, value, attention_mask),
                attn_mask_type=self.attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                heads=slice(group * heads, (group + 1) * heads),
            )

        inside = [norm for norm in (self.q_layernorm, self.k_layernorm) if norm is not None]
        parameters = [each for module in (*inside, self.core_attention) for each in module.parameters()]
        first = self.linear_qkv
        (norm, of_norm), kv_heads = self._norm, self.num_query_groups_per_partition
        sharing = sharing_groups(self.head_groups, kv_heads)
        queries = self.num_attention_heads_per_partition // (kv_heads * sharing)
        groups = Groups(
            *(attend, parameters, norm, of_norm),
            *(self.head_groups, sharing, queries, self.hidden_size_per_attention_head, self.overlap),
            *(first.tp_group, first.sequence_parallel, first.allreduce_dgrad),
        )
        return first(hidden_states, groups, self.linear_proj)

    def _rotate(
        self, tensors: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], packed: PackedSeqParams | None, group: Any
    ) -> Iterator[Tensor]:
        """Yield queries and keys with rotary positions; ``packed`` has the bounds."""
        bounds: list[Tensor | None] = [None, None]
        if packed is not None:
            padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
            plain = packed.cu_seqlens_q, packed.cu_seqlens_kv
            bounds = [b if a is None else a for a, b in zip(padded, plain, strict=True)]
        common = {"config": self.config, "mscale": rotary_scale(self), "cp_group": group}
        for x, angle, cu_seqlens in zip(tensors, angles, bounds, strict=True):
            yield apply_rotary_pos_emb(x, angle, cu_seqlens=cu_seqlens, **common)


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden
