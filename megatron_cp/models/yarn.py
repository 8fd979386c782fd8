"""YaRN: rotary embeddings for sequences longer than in training. Pure: no torch.

Dimensions that turn often within the original length keep their frequency; those that turn less than once are slowed
down by the scaling factor; the change in between is gradual. Queries and keys are also multiplied by a concentration
factor (https://arxiv.org/abs/2309.00071).
"""

from __future__ import annotations

import math

from megatron_cp.config.run_config import ModelConfig


def kept_fractions(model: ModelConfig, dims: int) -> list[float]:
    """Return how much frequency each of ``dims // 2`` pairs keeps: from 1 (all) to 0."""
    low, high = (_pair_that_turns(model, turns, dims) for turns in (model.yarn_beta_fast, model.yarn_beta_slow))
    if model.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    return [1 - min(max((pair - low) / width, 0.0), 1.0) for pair in range(dims // 2)]


def concentration(model: ModelConfig) -> float:
    """Return the factor of queries and keys."""
    if model.yarn_mscale is None or model.yarn_mscale_all_dim is None:
        return _sharper(model, 1.0)
    return _sharper(model, model.yarn_mscale) / _sharper(model, model.yarn_mscale_all_dim)


def _pair_that_turns(model: ModelConfig, turns: float, dims: int) -> float:
    """Return the (fractional) pair that makes ``turns`` in the original length."""
    assert model.yarn_original_max_position_embeddings is not None  # rule K55
    wave_length = model.yarn_original_max_position_embeddings / (turns * 2 * math.pi)
    return dims * math.log(wave_length) / (2 * math.log(int(model.rotary_base)))


def _sharper(model: ModelConfig, weight: float) -> float:
    return 0.1 * weight * math.log(max(model.yarn_rotary_scaling_factor or 1.0, 1.0)) + 1.0
