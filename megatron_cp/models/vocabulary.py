"""The rows of an embedding: a vocabulary, and what pads it. Pure."""

from __future__ import annotations

import math

from megatron_cp.config.run_config import RunConfig

BYTE_LEVEL = 257  # 256 bytes and the end of a document


def padded_vocab_size(config: RunConfig, vocab_size: int) -> int:
    """The embedding's rows: ``vocab_size`` padded so that tensor parallelism divides it.

    Padded to a multiple of lcm(make_vocab_size_divisible_by, tp) and not of their product, so that the padded model is
    the same one under every tensor-parallel size that divides ``make_vocab_size_divisible_by``.
    """
    return padded(vocab_size, config.model.make_vocab_size_divisible_by, config.model.tensor_model_parallel_size)


def padded(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """See :func:`padded_vocab_size`."""
    multiple = math.lcm(divisible_by, tensor_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple


def known_vocab_size(config: RunConfig) -> int | None:
    """Of the model or else the tokenizer; None where only the tokenizer's file tells it."""
    of_tokenizer = {"ByteLevelTokenizer": BYTE_LEVEL, "NullTokenizer": config.tokenizer.vocab_size}
    return config.model.vocab_size or of_tokenizer.get(config.tokenizer.tokenizer_type)
