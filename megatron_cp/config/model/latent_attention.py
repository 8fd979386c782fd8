"""Multi-latent attention"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import WEIGHTS, equals, setting, size

LATENT = equals("model.multi_latent_attention", True)


@dataclass
class LatentAttention:
    multi_latent_attention: bool = setting(False, "compute keys and values from one latent vector per token", WEIGHTS)
    q_lora_rank: int | None = size(None, "dimensions of the queries' latent; null: no latent", WEIGHTS, when=LATENT)
    kv_lora_rank: int = size(32, "dimensions of the latent of keys and values", WEIGHTS, when=LATENT)
    qk_head_dim: int = size(128, "dimensions of a query or key without rotary embedding", WEIGHTS, when=LATENT)
    qk_pos_emb_head_dim: int = size(64, "dimensions of a query or key with rotary embedding", WEIGHTS, when=LATENT)
    v_head_dim: int = size(128, "dimensions of a value", WEIGHTS, when=LATENT)
