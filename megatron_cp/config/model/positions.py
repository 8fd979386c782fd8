"""Position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_cp.config.setting import FUNCTION, WEIGHTS, When, equals, given, positive, setting, size


def _rotates(run: Any) -> bool:
    """Latent attention does, whatever the position embeddings."""
    return run.model.position_embedding_type in ("rope", "yarn") or run.model.multi_latent_attention


ROPE = "model.position_embedding_type=rope"
ROTATES = When(f"{ROPE} or yarn", _rotates, ROPE)
# What latent attention and YaRN leave out of these is an error already.
STRETCHES = When(ROPE, _rotates, ROPE)
SCALES = When(
    "model.rope_scaling=true",
    lambda run: run.model.rope_scaling or run.model.multi_latent_attention,
    "model.rope_scaling=true",
)
YARN = equals("model.position_embedding_type", "yarn")


@dataclass
class Positions:
    position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = setting(
        "rope", "rotary positions, rotary ones lengthened by YaRN, learned ones, or none", WEIGHTS
    )
    max_position_embeddings: int | None = size(
        None, "positions that the model has; null: a sample's, or YaRN's factor times its original length", WEIGHTS
    )
    rotary_base: float = setting(
        10000.0, "base of the rotary frequencies", FUNCTION, least=1, when=ROTATES, translated=True
    )
    rotary_base_local: float | None = setting(
        None,
        "base of layers with a window, whose positions nothing stretches; null: rotary_base",
        FUNCTION,
        least=1,
        when=(ROTATES, given("model.window_size", [1023, 0])),
    )
    rotary_percent: float = setting(
        1.0, "share of a head's dimensions that is rotated", FUNCTION, when=ROTATES, translated=True
    )
    rotary_interleaved: bool = setting(False, "neighbouring dimensions are a pair, not halves", FUNCTION, when=ROTATES)
    no_rope_freq: int | list[int] | None = setting(
        None, "layers without rotary embedding: every n-th, or a list of 0 and 1, one a layer", FUNCTION, when=ROTATES
    )
    rope_scaling: bool = setting(False, "frequencies are scaled as Llama 3.1's", FUNCTION, when=STRETCHES)
    rope_scaling_factor: float = positive(
        8.0, "how much low frequencies are slowed", FUNCTION, when=(STRETCHES, SCALES)
    )
    seq_len_interpolation_factor: float | None = positive(None, "positions are divided by it", FUNCTION, when=STRETCHES)
    yarn_rotary_scaling_factor: float | None = setting(
        None, "how many times longer than the original length; YaRN needs it", FUNCTION, least=1, when=YARN
    )
    yarn_original_max_position_embeddings: int | None = setting(
        None, "length that the model was trained on before; YaRN needs it", FUNCTION, least=1, when=YARN
    )
    yarn_beta_fast: float = positive(
        32.0, "turns within the original length from which on a dimension keeps its frequency", FUNCTION, when=YARN
    )
    yarn_beta_slow: float = positive(1.0, "turns up to which it is slowed by the whole factor", FUNCTION, when=YARN)
    yarn_mscale: float | None = setting(
        None,
        "of the concentration factor, with the next; null: 0.1 ln(scaling factor) + 1",
        FUNCTION,
        when=(YARN, given("model.yarn_mscale_all_dim", 1.0)),
    )
    yarn_mscale_all_dim: float | None = setting(
        None, "of the concentration factor, with the one before", FUNCTION, when=(YARN, given("model.yarn_mscale", 1.0))
    )
    yarn_correction_range_round_to_int: bool = setting(
        True, "the dimensions between fast and slow ones begin and end at whole ones", FUNCTION, when=YARN
    )
