"""Rows of an embedding: a vocabulary and its padding. Pure."""

from __future__ import annotations

import math

from megatron_cp.config.run_config import ModelConfig, TokenizerConfig

BYTE_LEVEL = 257  # 256 bytes and the end of a document


def padded_vocab_size(model: ModelConfig, vocab_size: int) -> int:
    """Return the embedding's rows: ``vocab_size`` padded for tensor parallelism.

    Padded to a multiple of lcm(make_vocab_size_divisible_by, tp), not of the product: the padded model is then equal
    under every tensor-parallel size that divides ``make_vocab_size_divisible_by``.
    """
    return padded(vocab_size, model.make_vocab_size_divisible_by, model.tensor_model_parallel_size)


def padded(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Pad as :func:`padded_vocab_size`."""
    multiple = math.lcm(divisible_by, tensor_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple


def known_vocab_size(model: ModelConfig, tokenizer: TokenizerConfig) -> int | None:
    """Return the model's or tokenizer's size; None if only a file has it."""
    of_tokenizer = {"ByteLevelTokenizer": BYTE_LEVEL, "NullTokenizer": tokenizer.vocab_size}
    return model.vocab_size or of_tokenizer.get(tokenizer.tokenizer_type)
