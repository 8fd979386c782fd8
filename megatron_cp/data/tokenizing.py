"""Texts made into documents of tokens, and these into a Megatron ``.bin``/``.idx`` pair."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_cp.data.tokenizers import Tokenizer
from megatron_cp.errors import DataError


def encode(tokenizer: Tokenizer, text: str, prompt: str = "") -> tuple[list[int], int]:
    """The ids of a document, of which the last ends it, and how many of them are its prompt's.

    No ids at all where ``text``, which follows the prompt, has none.
    """
    ids = tokenizer.tokenize(prompt) if prompt else []
    prompt_length = len(ids)
    ids += tokenizer.tokenize(text) if text.strip() else []
    if len(ids) == prompt_length:
        return [], 0
    ids.append(tokenizer.eod)
    return ids, prompt_length


@contextmanager
def indexed_writer(prefix: str, vocab_size: int, source: str) -> Iterator[Any]:
    """megatron-core's ``IndexedDatasetBuilder`` of ``prefix.bin`` and ``prefix.idx``.

    They are written aside and renamed at the end: where the body raises, nothing is left, and an earlier pair stays.

    Raises:
        DataError: no document was added; ``source`` says where there should have been one.
        OSError: the files cannot be written.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # takes seconds

    # Not the process's number: on two nodes or in two containers it may be the same.
    name = uuid.uuid4().hex[:8]
    aside = {ending: f"{prefix}{ending}.tmp-{name}" for ending in (".bin", ".idx")}
    try:
        builder = IndexedDatasetBuilder(aside[".bin"], dtype=DType.optimal_dtype(vocab_size))
        yield builder
        if not builder.sequence_lengths:
            raise DataError(f"{source}: no text inside.")
        builder.finalize(aside[".idx"])
        # Without its index a .bin is nothing: an interruption between the renames leaves no pair that looks whole.
        Path(prefix + ".idx").unlink(missing_ok=True)
        for ending, path in aside.items():
            os.replace(path, prefix + ending)
    finally:
        for path in aside.values():
            Path(path).unlink(missing_ok=True)
