"""B rules: sequence lengths and how sequences are sliced."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_cp.attention.transports.registry import RING
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import nearest_multiples


@rule(
    "B1",
    "2 * cp divides the sequence length.",
    "Each rank takes two of 2 * cp chunks, one from the front and one from the back, to balance causal work. "
    "megatron-core alone fails late, in a view.",
    broken(dataset=dict(seq_length=250)),
)
def sequence_divides_by_cp(c: Context) -> Iterator[Finding]:
    length = c.config.dataset.seq_length
    if c.cp > 1 and not c.packed and length % (2 * c.cp):
        yield Finding(
            NAME.dataset.seq_length,
            "Sequence length must be divisible by 2 * context parallel size if context parallel is used; "
            f"{length} is not divisible by {2 * c.cp}",
            values=nearest_multiples(length, _multiple(c)),
        )


@rule(
    "B2",
    "With sequence parallelism, cp * tp divides the sequence length.",
    "Each context-parallel slice is split again over the tensor-parallel ranks.",
    broken(
        *RING.settings,
        model=dict(sequence_parallel=True, tensor_model_parallel_size=4, context_parallel_size=2),
        dataset=dict(seq_length=260),
        world_size=8,
    ),
)
def sequence_divides_by_tp(c: Context) -> Iterator[Finding]:
    length = c.config.dataset.seq_length
    if c.model.sequence_parallel and c.tp > 1 and not c.packed and length % (c.cp * c.tp):
        yield Finding(
            NAME.dataset.seq_length,
            "First dimension of the tensor should be divisible by tensor parallel size: under sequence parallelism "
            f"{length} must be a multiple of cp * tp = {c.cp * c.tp}",
            values=nearest_multiples(length, _multiple(c)),
        )


def _multiple(c: Context) -> int:
    """Return the number that must divide the sequence length."""
    parts = [1]
    if c.cp > 1:
        parts.append(2 * c.cp)
    if c.model.sequence_parallel:
        parts.append(c.cp * c.tp)
    return math.lcm(*parts)


@rule(
    "B3",
    "The model and the data have the same sequence length.",
    "Bridge's command line silently replaces the model's length by the data's. Setting one of them is enough.",
    broken(model=dict(seq_length=512), dataset=dict(seq_length=256)),
)
def sequence_lengths_match(c: Context) -> Iterator[Finding]:
    model, data = c.model.seq_length, c.config.dataset.seq_length
    if model is not None and model != data:
        yield Finding(
            NAME.model.seq_length,
            "Please ensure sequence length configuration in model config and dataset config match. "
            f"The model's is {model}, the dataset's {data}",
            f"={data}",
            f"{NAME.dataset.seq_length}={model} {NAME.model.seq_length}={model}",
        )


@rule(
    "B4",
    "The sequence fits the model's positions.",
    "Learned positions end in an index error. Rotary positions continue past the length on which they were trained.",
    broken(
        dataset=dict(seq_length=512),
        model=dict(max_position_embeddings=256, position_embedding_type="learned_absolute"),
    ),
)
def sequence_fits_positions(c: Context) -> Iterator[Finding]:
    model, length = c.model, c.config.dataset.seq_length
    known = model.max_position_embeddings
    if known is None or length <= known or model.position_embedding_type in ("none", "yarn"):  # yarn: K55 and B13
        return
    learned = model.position_embedding_type == "learned_absolute"
    yield Finding(
        NAME.model.max_position_embeddings,
        f"the sequence length ({length}) is greater than {NAME.model.max_position_embeddings} ({known})",
        f"={length}",
        severity="error" if learned else "warning",
    )


@rule(
    "B13",
    f"With YaRN, {NAME.model.max_position_embeddings} is the scaling factor times the original length.",
    "Training does not read it, but an exported model declares it. Some versions of transformers (such as 4.51) "
    "divide it by the original length to get the scaling factor. Another ratio gives another model there.",
    broken(
        model=dict(
            position_embedding_type="yarn",
            yarn_rotary_scaling_factor=4.0,
            yarn_original_max_position_embeddings=128,
            max_position_embeddings=256,
        )
    ),
    severity="warning",
)
def yarn_declares_its_length(c: Context) -> Iterator[Finding]:
    factor, length = c.model.yarn_rotary_scaling_factor, c.model.yarn_length
    original = c.model.yarn_original_max_position_embeddings
    if factor is None or original is None or length is None:
        return
    fix = f"{NAME.model.max_position_embeddings}={length}"
    if not math.isclose(factor * original, length):
        message = f"times the original {original} positions is {factor * original:g}, not a whole number"
        whole = f"{NAME.model.yarn_rotary_scaling_factor}={length / original}"
        yield Finding(NAME.model.yarn_rotary_scaling_factor, message, f"{whole} {fix}")
    elif c.model.max_position_embeddings != length:
        message = f"the scaling factor {factor} times the original {original} positions is {length}"
        yield Finding(NAME.model.max_position_embeddings, message, fix)
