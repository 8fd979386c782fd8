"""Attention: heads, masks and softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_cp.config.setting import FUNCTION, LAYOUT, WEIGHTS, equals, positive, setting, share, size

OWN_KEYS = equals("model.multi_latent_attention", False)
CLIPPED = equals("model.qk_clip", True)


@dataclass
class Attention:
    num_attention_heads: int = size(4, "query heads", WEIGHTS)
    num_query_groups: int | None = size(
        None, "key and value heads; null: as many as query heads", WEIGHTS, when=OWN_KEYS, translated=True
    )
    kv_channels: int | None = size(
        None, "dimensions of a head; null: hidden_size / num_attention_heads", WEIGHTS, when=OWN_KEYS
    )
    add_qkv_bias: bool = setting(False, "the projections to queries, keys and values have biases", WEIGHTS)
    qk_layernorm: bool = setting(False, "queries and keys are normalized, a head at a time", WEIGHTS)
    qk_l2_norm: bool = setting(False, "queries and keys are divided by their root mean square, as Llama 4's", FUNCTION)
    attention_output_gate: bool = setting(
        False, "attention's output is multiplied with the sigmoid of one more projection", WEIGHTS
    )
    attention_dropout: float = share(0.0, "dropout of attention's weights")
    attention_mask_type: Literal["causal", "no_mask"] = setting(
        "causal", "causal, or no_mask: every token sees all", FUNCTION
    )
    softmax_scale: float | None = positive(None, "of the scores; null: 1 / sqrt(dimensions of a head)", FUNCTION)
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = setting(
        "vanilla", "vanilla, or with a sink: exp(0) in the sum, or a learned number a head", WEIGHTS
    )
    qk_clip: bool = setting(
        False, "after a step, weights of queries and keys shrink where a score is above qk_clip_threshold"
    )
    qk_clip_threshold: float = positive(100.0, "largest score of a head that qk_clip leaves as it is", when=CLIPPED)
    qk_clip_alpha: float = share(0.5, "power of the factor that queries take; keys take the rest", when=CLIPPED)
    log_max_attention_logit: bool = setting(False, "log the largest score of each step; qk_clip does so anyway")
    window_size: list[int] | None = setting(
        None, "[left, right]: keys that a query sees beside its own; -1: all of that side", FUNCTION, translated=True
    )
    window_attn_skip_freq: int | list[int] | None = setting(
        None, "layers with a window: all but every n-th, or a list of 0 and 1, one a layer", FUNCTION
    )
    attention_backend: Literal["auto", "te", "native"] = setting(
        "auto", "whose attention runs: Transformer Engine's, or our own", LAYOUT, translated=True
    )
