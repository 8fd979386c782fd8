"""Maximal update parametrization (muP): learning rates tuned on a narrow model"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import FUNCTION, equals, positive, setting, size

MUP = equals("model.use_mup", True)


@dataclass
class Width:
    use_mup: bool = setting(False, "scale initial weights, learning rates, scores and logits by the width", FUNCTION)
    mup_base_hidden_size: int | None = size(
        None, "width for which the learning rate was tuned; null: hidden_size", FUNCTION, when=MUP
    )
    mup_embedding_mult: float = setting(1.0, "factor on the embedding", FUNCTION, when=MUP)
    mup_output_mult: float = setting(1.0, "factor on logits; 1: mup_base_hidden_size / hidden_size", FUNCTION, when=MUP)
    mup_base_head_dim: float | None = positive(
        None, "head dim of the narrow model; keeps its scale of attention scores", FUNCTION, when=MUP
    )
    mup_attn_scale_power: float = setting(
        1.0, "attention scores are divided by head dim to this power; 0.5 is usual without muP", FUNCTION, when=MUP
    )
