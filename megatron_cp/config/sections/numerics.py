"""Precision and random numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import LARGEST, positive, setting


@dataclass
class RNGConfig:
    seed: int = setting(1234, "of weights and dropout", least=0, most=LARGEST)
    data_parallel_random_init: bool = setting(False, "each replica draws weights, then takes those of the first")


@dataclass
class MixedPrecisionConfig:
    """At most one of the three; none of them means bf16 on GPUs and fp32 on CPUs."""

    fp32: bool = setting(False, "32-bit floating point", translated=True)
    bf16: bool = setting(False, "bfloat16, with float32 weights in the optimizer", translated=True)
    fp16: bool = setting(False, "16-bit floating point, whose losses are scaled", translated=True)
    loss_scale: float | None = positive(
        None,
        "what losses are multiplied with, so that small gradients are not 0; null: found while training",
        translated=True,
    )
    initial_loss_scale: float = positive(2.0**32, "the first one that is tried")
    min_loss_scale: float = positive(1.0, "the least one")
    loss_scale_window: int = setting(1000, "steps without an overflow after which it doubles", least=1)
    hysteresis: int = setting(2, "overflows until it halves", least=1)
