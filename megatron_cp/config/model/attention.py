"""Attention: heads, masks and softmax"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import FUNCTION, LAYOUT, WEIGHTS, equals, positive, setting, share, size

MULTI_HEAD = equals("model.multi_latent_attention", False)
CLIPPED = equals("model.qk_clip", True)


@dataclass
class Attention:
    num_attention_heads: int = size(4, "query heads", WEIGHTS)
    num_query_groups: int | None = size(
        None, "key/value heads; null: as many as query heads", WEIGHTS, when=MULTI_HEAD, translated=True
    )
    kv_channels: int | None = size(None, "head dim; null: hidden_size / num_attention_heads", WEIGHTS, when=MULTI_HEAD)
    add_qkv_bias: bool = setting(False, "biases in the projections of queries, keys and values", WEIGHTS)
    qk_layernorm: bool = setting(False, "normalize queries and keys, per head", WEIGHTS)
    qk_l2_norm: bool = setting(False, "divide queries and keys by their root mean square, as Llama 4 does", FUNCTION)
    attention_output_gate: bool = setting(
        False, "multiply the attention output by the sigmoid of another projection", WEIGHTS
    )
    attention_dropout: float = share(0.0, "dropout of attention weights")
    attention_mask_type: Literal["causal", "no_mask"] = setting(
        "causal", "causal, or no_mask: full attention", FUNCTION
    )
    softmax_scale: float | None = positive(None, "scale of attention scores; null: 1 / sqrt(head dim)", FUNCTION)
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = setting(
        "vanilla", "vanilla, or with a sink: off-by-one adds exp(0) to the sum, learnable one number per head", WEIGHTS
    )
    qk_clip: bool = setting(
        False, "after a step, shrink query and key weights of heads with a score above qk_clip_threshold"
    )
    qk_clip_threshold: float = positive(100.0, "largest attention score that qk_clip allows", when=CLIPPED)
    qk_clip_alpha: float = share(0.5, "exponent of the factor for queries; keys get the rest", when=CLIPPED)
    log_max_attention_logit: bool = setting(
        False, "log the largest attention score of each step; always on with qk_clip"
    )
    window_size: list[int] | None = setting(
        None, "[left, right]: keys that a query sees on each side; -1: no limit", FUNCTION, translated=True
    )
    window_attn_skip_freq: int | list[int] | None = setting(
        None, "layers with a window: all but every n-th, or a list of 0 and 1, one per layer", FUNCTION
    )
    attention_backend: Literal["auto", "te", "native"] = setting(
        "auto",
        "te: Transformer Engine's attention; native: this project's; auto: the best available",
        LAYOUT,
        translated=True,
    )
