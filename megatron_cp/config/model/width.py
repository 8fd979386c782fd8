"""Maximal update parametrization (muP): learning rates that were found for a narrow model hold for a wide one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import FUNCTION, equals, positive, setting, size

MUP = equals("model.use_mup", True)


@dataclass
class Width:
    use_mup: bool = setting(False, "initial weights, learning rates, scores and logits follow the width", FUNCTION)
    mup_base_hidden_size: int | None = size(
        None, "width that the learning rate was found for; null: hidden_size", FUNCTION, when=MUP
    )
    mup_embedding_mult: float = setting(1.0, "the embedding is multiplied with it", FUNCTION, when=MUP)
    mup_output_mult: float = setting(
        1.0, "logits are multiplied with it; 1: mup_base_hidden_size / hidden_size", FUNCTION, when=MUP
    )
    mup_base_head_dim: float | None = positive(
        None, "dimensions of a head of the narrow model: scores keep its scale", FUNCTION, when=MUP
    )
    mup_attn_scale_power: float = setting(
        1.0, "scores are divided by this power of a head's dimensions; 0.5 is usual without muP", FUNCTION, when=MUP
    )
