"""Mamba-2 layers"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import WEIGHTS, equals, setting

HYBRID = equals("model.architecture", "hybrid")


@dataclass
class Mamba:
    mamba_state_dim: int = setting(128, "dimensions of the state", WEIGHTS, when=HYBRID)
    mamba_head_dim: int = setting(64, "dimensions of a head", WEIGHTS, when=HYBRID)
    mamba_num_groups: int = setting(8, "groups of heads that share B and C", WEIGHTS, when=HYBRID)
    mamba_num_heads: int | None = setting(None, "heads; null: 2 hidden_size / mamba_head_dim", WEIGHTS, when=HYBRID)
