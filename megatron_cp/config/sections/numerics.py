"""Precision and random numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import LARGEST, positive, setting


@dataclass
class RNGConfig:
    seed: int = setting(1234, "seed of weights and dropout", least=0, most=LARGEST)
    data_parallel_random_init: bool = setting(
        False, "each replica initializes weights, then copies the first replica's"
    )


@dataclass
class MixedPrecisionConfig:
    """Precision: at most one of the three; if none, bf16 on GPUs and fp32 on CPUs."""

    fp32: bool = setting(False, "32-bit floating point", translated=True)
    bf16: bool = setting(False, "bfloat16, with float32 weights in the optimizer", translated=True)
    fp16: bool = setting(False, "16-bit floating point, with loss scaling", translated=True)
    loss_scale: float | None = positive(
        None,
        "factor on the loss that keeps small gradients above 0; null: dynamic",
        translated=True,
    )
    initial_loss_scale: float = positive(2.0**32, "initial dynamic loss scale")
    min_loss_scale: float = positive(1.0, "smallest dynamic loss scale")
    loss_scale_window: int = setting(1000, "steps without overflow until the scale doubles", least=1)
    hysteresis: int = setting(2, "overflows until the scale halves", least=1)
