"""Encode texts as documents, and write documents to a ``.bin``/``.idx`` pair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_cp.common.atomic_files import atomic_write
from megatron_cp.common.errors import DataError
from megatron_cp.data.text.records import ENDING, write_record
from megatron_cp.data.text.tokenizers import Tokenizer


def encode(tokenizer: Tokenizer, text: str, prompt: str = "") -> tuple[list[int], int]:
    """Return the ids of a document, and the number of prompt ids (BOS included).

    The document is BOS (if the tokenizer has one), prompt, text and end-of-document token. A text that begins with BOS,
    such as from a chat template, gets no second one. Returns ([], 0) if ``text`` has no tokens.
    """
    ids = tokenizer.tokenize(prompt) if prompt else []
    prompt_length = len(ids)
    ids += tokenizer.tokenize(text) if text.strip() else []
    if len(ids) == prompt_length:
        return [], 0
    prefix = tokenizer.prefix
    if tuple(ids[: len(prefix)]) != prefix:
        ids = [*prefix, *ids]
        prompt_length += len(prefix) if prompt_length else 0
    return [*ids, *tokenizer.suffix], prompt_length


@contextmanager
def indexed_writer(prefix: str, tokenizer: Tokenizer, source: str) -> Iterator[Any]:
    """Yield an ``IndexedDatasetBuilder``; then write the tokenizer's record.

    The files get temporary names and are renamed at the end: if the body raises, an earlier pair stays unchanged.

    Raises:
        DataError: no document was added; the message names ``source``.
        OSError: the files cannot be written.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # takes seconds

    with atomic_write(*(Path(prefix + ending) for ending in (".bin", ENDING, ".idx"))) as (tokens, record, index):
        builder = IndexedDatasetBuilder(str(tokens), dtype=DType.optimal_dtype(tokenizer.vocab_size))
        yield builder
        if not builder.sequence_lengths:
            raise DataError(f"{source}: has no text. Fix: name files with text")
        builder.finalize(str(index))
        write_record(str(record), tokenizer)
