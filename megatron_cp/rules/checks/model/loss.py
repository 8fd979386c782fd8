"""G. The loss, gradients and their reduction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule


@rule(
    "G1",
    "Per-token loss and averaging in the collective exclude each other.",
    "Per-token loss divides the summed gradients by the number of tokens of all ranks, once, at the end.",
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
    "Averaged per rank, slices with few unmasked tokens weigh as much as full ones: a biased loss and gradient, and "
    "NaN where a slice has none. Upstream allows it for pretraining.",
    broken(model=dict(calculate_per_token_loss=False)),
)
def per_token_loss(c: Context) -> Iterator[Finding]:
    if (c.cp > 1 or c.packed) and not c.model.calculate_per_token_loss:
        yield Finding(
            NAME.model.calculate_per_token_loss,
            "false averages each context-parallel rank's slice by its own number of tokens: a biased loss",
            "=true",
        )
