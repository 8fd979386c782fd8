"""Position embeddings"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_cp.config.setting import FUNCTION, WEIGHTS, When, equals, given, positive, setting, size


def _rotates(run: Any) -> bool:
    """Return whether the model has rotary embeddings; latent attention always has."""
    return run.model.position_embedding_type in ("rope", "yarn") or run.model.multi_latent_attention


ROPE = "model.position_embedding_type=rope"
ROTATES = When(f"{ROPE} or yarn", _rotates, ROPE)
# Other rules report settings that latent attention and YaRN ignore.
ROPE_ONLY = When(ROPE, _rotates, ROPE)
SCALES = When(
    "model.rope_scaling=true",
    lambda run: run.model.rope_scaling or run.model.multi_latent_attention,
    "model.rope_scaling=true",
)
YARN = equals("model.position_embedding_type", "yarn")


@dataclass
class Positions:
    position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = setting(
        "rope", "rotary (rope), rotary extended by YaRN (yarn), learned, or none", WEIGHTS
    )
    max_position_embeddings: int | None = size(
        None, "number of positions; null: a sample's length, or YaRN's factor times its original length", WEIGHTS
    )
    rotary_base: float = setting(
        10000.0, "base of the rotary frequencies", FUNCTION, least=1, when=ROTATES, translated=True
    )
    rotary_base_local: float | None = setting(
        None,
        "rotary base of layers with a window, never scaled; null: rotary_base",
        FUNCTION,
        least=1,
        when=(ROTATES, given("model.window_size", [1023, 0])),
    )
    rotary_percent: float = setting(
        1.0, "fraction of a head's dimensions with rotary embedding", FUNCTION, when=ROTATES, translated=True
    )
    rotary_interleaved: bool = setting(False, "pair neighbouring dimensions instead of halves", FUNCTION, when=ROTATES)
    no_rope_freq: int | list[int] | None = setting(
        None, "layers without rotary embedding: every n-th, or a list of 0 and 1, one per layer", FUNCTION, when=ROTATES
    )
    rope_scaling: bool = setting(False, "scale frequencies as Llama 3.1 does", FUNCTION, when=ROPE_ONLY)
    rope_scaling_factor: float = positive(
        8.0, "factor that divides low frequencies", FUNCTION, when=(ROPE_ONLY, SCALES)
    )
    seq_len_interpolation_factor: float | None = positive(
        None, "factor that divides positions", FUNCTION, when=ROPE_ONLY
    )
    yarn_rotary_scaling_factor: float | None = setting(
        None, "new length / original length; required by YaRN", FUNCTION, least=1, when=YARN
    )
    yarn_original_max_position_embeddings: int | None = setting(
        None, "length of the original training; required by YaRN", FUNCTION, least=1, when=YARN
    )
    yarn_beta_fast: float = positive(
        32.0, "dimensions with more turns in the original length keep their frequency", FUNCTION, when=YARN
    )
    yarn_beta_slow: float = positive(
        1.0, "dimensions with fewer turns in the original length are scaled by the whole factor", FUNCTION, when=YARN
    )
    yarn_mscale: float | None = setting(
        None,
        "mscale in the numerator of the concentration factor; null: 0.1 ln(scaling factor) + 1",
        FUNCTION,
        when=(YARN, given("model.yarn_mscale_all_dim", 1.0)),
    )
    yarn_mscale_all_dim: float | None = setting(
        None,
        "mscale in the denominator of the concentration factor",
        FUNCTION,
        when=(YARN, given("model.yarn_mscale", 1.0)),
    )
    yarn_correction_range_round_to_int: bool = setting(
        True, "round the bounds between fast and slow dimensions to whole dimensions", FUNCTION, when=YARN
    )
