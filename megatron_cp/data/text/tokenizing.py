"""Texts made into documents of tokens, and these into a Megatron ``.bin``/``.idx`` pair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_cp.common.atomic_files import written_aside
from megatron_cp.common.errors import DataError
from megatron_cp.data.text.records import ENDING, write_record
from megatron_cp.data.text.tokenizers import Tokenizer


def encode(tokenizer: Tokenizer, text: str, prompt: str = "") -> tuple[list[int], int]:
    """The ids of a document and how many of them are its prompt's, which BOS is part of.

    The document is BOS where the tokenizer has one, the prompt, the text, and the end-of-document token. A text that
    begins with BOS itself, as one by a chat template does, gets no second one. No ids where ``text`` has none.
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
    """megatron-core's ``IndexedDatasetBuilder`` of ``prefix.bin`` and ``prefix.idx``, with a record of the tokenizer.

    They are written aside and renamed at the end: where the body raises, nothing is left, and an earlier pair stays.

    Raises:
        DataError: no document was added; ``source`` says where there should have been one.
        OSError: the files cannot be written.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # takes seconds

    with written_aside(*(Path(prefix + ending) for ending in (".bin", ENDING, ".idx"))) as (tokens, record, index):
        builder = IndexedDatasetBuilder(str(tokens), dtype=DType.optimal_dtype(tokenizer.vocab_size))
        yield builder
        if not builder.sequence_lengths:
            raise DataError(f"{source}: no text inside.")
        builder.finalize(str(index))
        write_record(str(record), tokenizer)
        # Without its index a .bin is nothing: an interruption between the renames leaves no pair that looks whole.
        Path(prefix + ".idx").unlink(missing_ok=True)
