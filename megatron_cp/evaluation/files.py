"""Open the files of an evaluation, each as a source of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_cp.config.run_config import DatasetConfig, TokenizerConfig
from megatron_cp.data.formats.documents import open_documents
from megatron_cp.data.formats.indexed import open_indexed
from megatron_cp.data.formats.loss_spans import map_spans
from megatron_cp.data.formats.rows import LINES, PARQUET
from megatron_cp.data.formats.sample_files import check_first_row, log_notes, tokenized
from megatron_cp.data.samples.varlen import DocumentDataset
from megatron_cp.data.text.records import check_records
from megatron_cp.data.text.tokenizers import NullTokenizer, Tokenizer
from megatron_cp.evaluation.paths import is_indexed
from megatron_cp.parallel.collectives import run_on_all_ranks, run_once_per_node


def _is_text(path: str) -> bool:
    return Path(path).suffix not in (*LINES, PARQUET)


def check_files(paths: Sequence[str], data: DatasetConfig, tokenizer: Tokenizer, settings: TokenizerConfig) -> None:
    """Check the files on one rank, before the rendezvous.

    Reads headers and first rows.

    Raises:
        DataError: a file is unusable, or has other special tokens than ``tokenizer``.
    """
    for path in paths:
        if is_indexed(path):
            open_indexed(path)
        else:
            check_first_row(path, tokenizer, data, one_text=_is_text(path))
    check_records([path for path in paths if is_indexed(path)], data, tokenizer, settings)


def open_sources(paths: Sequence[str], data: DatasetConfig, tokenizer: Tokenizer) -> list[DocumentDataset]:
    """Open each file as documents. Collective.

    Longer documents are split into samples of ``seq_length`` targets.

    Raises:
        DataError: a file is unusable; raised on every rank with one message.
    """
    data = replace(data, too_long="split")

    def prefix_of(path: str) -> str:
        return path if is_indexed(path) else tokenized(path, tokenizer, data, one_text=_is_text(path))

    def prepare() -> dict[str, int]:
        for path in paths:
            open_documents(open_indexed(prefix_of(path)), data.seq_length, data.path_to_cache)
        return {path: open_indexed(prefix_of(path)).num_tokens for path in paths}

    def open_all() -> list[DocumentDataset]:
        sources = []
        for path in paths:
            prefix = prefix_of(path)
            if not is_indexed(path):
                log_notes(prefix)
            sources.append(
                DocumentDataset(
                    prefix,
                    data.seq_length,
                    spans=None if is_indexed(path) else map_spans(prefix),
                    vocab_size=tokenizer.vocab_size,
                    path_to_cache=data.path_to_cache,
                    name=path,
                )
            )
        return sources

    run_once_per_node(prepare)
    return run_on_all_ranks(open_all)


def text_bytes(source: DocumentDataset, tokenizer: Tokenizer, first: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield every ``step``-th document, and the bytes of its text in the loss.

    Special tokens stand for no text. Yields nothing for a tokenizer without text.
    """
    if isinstance(tokenizer, NullTokenizer):
        return
    documents = source.documents_of(np.arange(len(source)))
    for document in range(first, source.num_documents, step):
        begin, end = np.searchsorted(documents, [document, document + 1])
        ids: list[int] = []
        for index in range(int(begin), int(end)):
            sample = source[index]
            ids += sample["labels"][sample["loss_mask"] == 1].tolist()
        text = tokenizer.decode([token for token in ids if token not in tokenizer.special_ids])
        yield document, len(text.encode("utf-8"))
