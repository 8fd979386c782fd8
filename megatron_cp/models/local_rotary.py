"""Rotary embeddings with their own base in layers with a window."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_cp.config.run_config import ModelConfig
from megatron_cp.models.layers.head_groups.attention import HeadGroupsAttention


class LocalAndGlobalRotary(torch.nn.Module):
    """Rotary angles of layers without and with a window, stacked: ``[2, s, 1, 1, d]``.

    One tensor, because megatron-core passes one tensor to all layers, also in recomputation. ``rope_scaling`` and
    ``seq_len_interpolation_factor`` apply to layers without a window only.
    """

    def __init__(self, without_window: RotaryEmbedding, model: ModelConfig) -> None:
        super().__init__()
        assert model.kv_channels is not None and model.rotary_base_local is not None
        self.without_window = without_window
        self.with_window = RotaryEmbedding(
            model.kv_channels,
            rotary_percent=model.rotary_percent,
            rotary_interleaved=without_window.rotary_interleaved,
            rotary_base=model.rotary_base_local,
            use_cpu_initialization=without_window.inv_freq.device.type == "cpu",
            cp_group=without_window.cp_group,
        )
        self.get_rotary_seq_len = without_window.get_rotary_seq_len

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([self.without_window(*args, **kwargs), self.with_window(*args, **kwargs)])


class LocalRotaryAttention(SelfAttention):
    """Self-attention that selects its layer's angles of :class:`LocalAndGlobalRotary`."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        config = self.config
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[int(windowed)], **kwargs)


class LocalRotaryByHeadGroups(LocalRotaryAttention, HeadGroupsAttention):  # type: ignore[misc]  # keywords
    """The same, with heads computed in groups."""
