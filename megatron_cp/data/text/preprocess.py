"""Text into Megatron ``.bin``/``.idx`` files.

A text file is one document; each line of a ``.jsonl`` or ``.json`` file is one document, under one key. Every document
begins with the tokenizer's BOS token, where it has one, and ends with its end-of-document token.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.common.errors import DataError
from megatron_cp.common.terminal import say
from megatron_cp.config.run_config import TokenizerConfig
from megatron_cp.data.text.records import document_form
from megatron_cp.data.text.text_files import DEFAULT_SUFFIXES, left_out, read_documents, search
from megatron_cp.data.text.tokenizers import Tokenizer, build_tokenizer
from megatron_cp.data.text.tokenizing import encode, indexed_writer

_CHUNK_BYTES = 1 << 18  # text handed to a worker at once
_CHUNKS_IN_FLIGHT = 4  # per worker: bounds the memory


@dataclass(frozen=True)
class Summary:
    """What was written, and what is said of a folder's files that were left out for their endings.

    ``form`` is what was written for a text, such as ``<s> text </s>``.
    """

    prefix: str
    documents: int
    tokens: int
    empty_documents: int
    text_bytes: int
    form: str
    left_out: str = ""


class Progress:
    """Receives the bytes read so far; this one shows nothing."""

    def start(self, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def stop(self) -> None: ...


class RichProgress(Progress):
    """A bar with rich on a terminal, a line every tenth elsewhere."""

    def __init__(self, description: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._description = description
        self._console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._total = self._done = self._tenths = 0

    def start(self, total_bytes: int) -> None:
        self._total = max(total_bytes, 1)
        if self._console.is_terminal:
            self._bar.start()
            self._task = self._bar.add_task(self._description, total=self._total)

    def advance(self, num_bytes: int) -> None:
        if self._console.is_terminal:
            self._bar.advance(self._task, num_bytes)
            return
        self._done += num_bytes
        if self._done * 10 // self._total > self._tenths:
            self._tenths = self._done * 10 // self._total
            share = f"{self._tenths * 10}% of {self._total / 1e6:.1f} MB"
            say(f"{self._description}: {share}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        self._bar.stop()


def preprocess(
    inputs: Iterable[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer_config: TokenizerConfig,
    *,
    json_key: str = "text",
    suffixes: Sequence[str] = DEFAULT_SUFFIXES,
    workers: int = 1,
    progress: Progress | None = None,
) -> Summary:
    """Tokenize ``inputs`` into ``output_prefix.bin`` and ``.idx``; documents keep the order of the inputs.

    ``workers`` processes tokenize; 1 does it in this process. The result does not depend on it. Empty documents are
    left out.

    Raises:
        DataError: bad input (see ``text_files``), or no token in all of it.
        OSError: the output cannot be written.
    """
    if workers < 1:
        raise DataError(f"workers={workers}: must be 1 or more.")
    tokenizer = build_tokenizer(tokenizer_config)
    files, others = search(inputs, suffixes)
    prefix = str(output_prefix).removesuffix(".bin").removesuffix(".idx")
    if not prefix or prefix.endswith(os.sep):
        raise DataError(f"output_prefix={str(output_prefix)!r}: must end in a name, to which .bin and .idx are added.")
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    progress = progress or Progress()
    documents = tokens = empty = text_bytes = 0
    progress.start(sum(file.stat().st_size for file in files))
    source = f"{files[0]}{' and the other files' if len(files) > 1 else ''}"
    try:
        with indexed_writer(prefix, tokenizer, source) as writer:
            chunks = _tokenized(files, json_key, tokenizer, tokenizer_config, writer.dtype, workers)
            for ids, lengths, num_bytes in chunks:
                start = 0
                for length in lengths:
                    if length:
                        writer.add_document(ids[start : start + length], [length])
                        documents += 1
                    else:
                        empty += 1
                    start += length
                tokens += start
                text_bytes += num_bytes
                progress.advance(num_bytes)
    finally:
        progress.stop()
    return Summary(prefix, documents, tokens, empty, text_bytes, document_form(tokenizer), left_out(others, suffixes))


def _tokenized(
    files: Sequence[Path],
    json_key: str,
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    dtype: type[np.integer],
    workers: int,
) -> Iterator[tuple[np.ndarray, list[int], int]]:
    """(ids of some documents one after the other, length of each, bytes read) in the order of the files."""
    if workers == 1:
        for texts, num_bytes in _chunks(files, json_key):
            yield *_encode(tokenizer, texts, dtype), num_bytes
        return
    # Fresh processes: a forked copy of one whose tokenizer already runs threads would stop working.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (config, dtype)) as pool:
        pending: deque[tuple[Future, int]] = deque()
        try:
            for texts, num_bytes in _chunks(files, json_key):
                pending.append((pool.submit(_encode_in_worker, texts), num_bytes))
                if len(pending) >= _CHUNKS_IN_FLIGHT * workers:
                    done, size = pending.popleft()
                    yield *done.result(), size
            while pending:
                done, size = pending.popleft()
                yield *done.result(), size
        except BrokenProcessPool as error:
            raise DataError("a tokenizing process was killed (out of memory?); use fewer --workers.") from error
        finally:
            for future, _ in pending:
                future.cancel()


def _chunks(files: Sequence[Path], json_key: str) -> Iterator[tuple[list[str], int]]:
    texts: list[str] = []
    total = 0
    for file in files:
        for text, num_bytes in read_documents(file, json_key):
            texts.append(text)
            total += num_bytes
            if total >= _CHUNK_BYTES:
                yield texts, total
                texts, total = [], 0
    if texts:
        yield texts, total


def _encode(tokenizer: Tokenizer, texts: Sequence[str], dtype: type[np.integer]) -> tuple[np.ndarray, list[int]]:
    ids: list[int] = []
    lengths: list[int] = []
    for text in texts:
        document, _ = encode(tokenizer, text)
        ids += document
        lengths.append(len(document))
    return np.array(ids, dtype=dtype), lengths


_worker: dict[str, Any] = {}


def _start_worker(config: TokenizerConfig, dtype: type[np.integer]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker.update(tokenizer=build_tokenizer(config), dtype=dtype)


def _encode_in_worker(texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
    return _encode(_worker["tokenizer"], texts, _worker["dtype"])
