"""G rules: the loss, gradients and their reduction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule


@rule(
    "G1",
    "Per-token loss and averaging in the collective exclude each other.",
    "Per-token loss divides the summed gradients once, at the end, by the number of tokens on all ranks.",
    broken(ddp=dict(average_in_collective=True)),
)
def no_average_in_collective(c: Context) -> Iterator[Finding]:
    if c.model.calculate_per_token_loss and c.config.ddp.average_in_collective:
        yield Finding(
            NAME.ddp.average_in_collective, "Cannot average in collective when calculating per-token loss!", "=false"
        )


@rule(
    "G2",
    "The loss is per token under context parallelism.",
    "An average per rank gives slices with few unmasked tokens the weight of full ones. Loss and gradient are "
    "biased, and NaN where a slice has no unmasked token. Upstream allows this for pretraining.",
    broken(model=dict(calculate_per_token_loss=False)),
)
def per_token_loss(c: Context) -> Iterator[Finding]:
    if (c.cp > 1 or c.packed) and not c.model.calculate_per_token_loss:
        yield Finding(
            NAME.model.calculate_per_token_loss,
            "each context-parallel rank averages over its own tokens, which biases the loss",
            "=true",
        )
