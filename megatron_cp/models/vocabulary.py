"""The rows of an embedding: a vocabulary, and what pads it. Pure."""

from __future__ import annotations

import math

from megatron_cp.config.run_config import ModelConfig, TokenizerConfig

BYTE_LEVEL = 257  # 256 bytes and the end of a document


def padded_vocab_size(model: ModelConfig, vocab_size: int) -> int:
    """The embedding's rows: ``vocab_size`` padded so that tensor parallelism divides it.

    Padded to a multiple of lcm(make_vocab_size_divisible_by, tp) and not of their product, so that the padded model is
    the same one under every tensor-parallel size that divides ``make_vocab_size_divisible_by``.
    """
    return padded(vocab_size, model.make_vocab_size_divisible_by, model.tensor_model_parallel_size)


def padded(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """See :func:`padded_vocab_size`."""
    multiple = math.lcm(divisible_by, tensor_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple


def known_vocab_size(model: ModelConfig, tokenizer: TokenizerConfig) -> int | None:
    """Of the model or else the tokenizer; None where only the tokenizer's file tells it."""
    of_tokenizer = {"ByteLevelTokenizer": BYTE_LEVEL, "NullTokenizer": tokenizer.vocab_size}
    return model.vocab_size or of_tokenizer.get(tokenizer.tokenizer_type)
