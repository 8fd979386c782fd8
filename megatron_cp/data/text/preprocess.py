"""Tokenize text into Megatron ``.bin``/``.idx`` files.

A text file is one document; each line of a ``.jsonl`` or ``.json`` file is one document, under one key. A document
begins with the tokenizer's BOS token, if it has one, and ends with its end-of-document token.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
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

_CHUNK_BYTES = 1 << 18  # text per task of a worker
_CHUNKS_IN_FLIGHT = 4  # per worker: bounds the memory


@dataclass(frozen=True)
class Summary:
    """Counts of a preprocessing run.

    ``form`` is the form of a document, such as ``<s> text </s>``; ``left_out`` describes a folder's skipped files.
    """

    prefix: str
    documents: int
    tokens: int
    empty_documents: int
    text_bytes: int
    form: str
    left_out: str = ""


@contextmanager
def _progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds read bytes to a progress display.

    The display is a bar on a terminal, else a line every 10%. An empty ``description`` shows nothing.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (description and console.is_terminal)) as bar:
        task = bar.add_task(description, total=max(total_bytes, 1))

        def advance(num_bytes: int) -> None:
            before = int(bar.tasks[0].percentage // 10)
            bar.advance(task, num_bytes)
            tenths = int(bar.tasks[0].percentage // 10)
            if description and not console.is_terminal and tenths > before:
                share = f"{tenths * 10}% of {total_bytes / 1e6:.1f} MB"
                say(f"{description}: {share}", file=sys.stderr, flush=True)

        yield advance


def preprocess(
    inputs: Iterable[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer_config: TokenizerConfig,
    *,
    json_key: str = "text",
    suffixes: Sequence[str] = DEFAULT_SUFFIXES,
    workers: int = 1,
    progress: str = "",
) -> Summary:
    """Tokenize ``inputs``, in their order, into ``output_prefix.bin`` and ``.idx``.

    ``workers`` processes tokenize, or this process if 1; the result does not depend on it. Empty documents are skipped.
    ``progress`` is the label of the progress display.

    Raises:
        DataError: bad input (see ``text_files``), or no tokens in all inputs.
        OSError: the output cannot be written.
    """
    if workers < 1:
        raise DataError(f"workers={workers}: must be 1 or more. Fix: workers=1")
    tokenizer = build_tokenizer(tokenizer_config)
    files, others = search(inputs, suffixes)
    prefix = str(output_prefix).removesuffix(".bin").removesuffix(".idx")
    if not prefix or prefix.endswith(os.sep):
        raise DataError(
            f"output_prefix={str(output_prefix)!r}: must end in a file name. Fix: output_prefix={prefix + 'corpus'!r}"
        )
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    empty, text_bytes, total_bytes = 0, 0, sum(file.stat().st_size for file in files)
    source = f"{files[0]}{' and the other files' if len(files) > 1 else ''}"
    with _progress(progress, total_bytes) as advance, indexed_writer(prefix, tokenizer, source) as writer:
        chunks = _tokenized(files, json_key, tokenizer, tokenizer_config, writer.dtype, workers)
        for documents, num_bytes in chunks:
            for ids in documents:
                if len(ids):
                    writer.add_document(ids, [len(ids)])
                else:
                    empty += 1
            text_bytes += num_bytes
            advance(num_bytes)
    lengths, form = writer.sequence_lengths, document_form(tokenizer)
    return Summary(prefix, len(lengths), sum(lengths), empty, text_bytes, form, left_out(others, suffixes))


def _tokenized(
    files: Sequence[Path],
    json_key: str,
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    dtype: type[np.integer],
    workers: int,
) -> Iterator[tuple[list[np.ndarray], int]]:
    """Yield (ids of several documents, bytes read) in the order of the files."""
    if workers == 1:
        for texts, num_bytes in _chunks(files, json_key):
            yield _encode(tokenizer, texts, dtype), num_bytes
        return
    # spawn: a tokenizer that already uses threads would hang in a forked process.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (config, dtype)) as pool:
        pending: deque[Future[tuple[list[np.ndarray], int]]] = deque()
        try:
            for texts, num_bytes in _chunks(files, json_key):
                pending.append(pool.submit(_encode_in_worker, texts, num_bytes))
                if len(pending) >= _CHUNKS_IN_FLIGHT * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"--workers {workers}: a worker was killed, probably for lack of memory. Fix: --workers {workers // 2}"
            ) from error
        finally:
            for future in pending:
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


def _encode(tokenizer: Tokenizer, texts: Sequence[str], dtype: type[np.integer]) -> list[np.ndarray]:
    return [np.array(encode(tokenizer, text)[0], dtype=dtype) for text in texts]


_worker: dict[str, Any] = {}


def _start_worker(config: TokenizerConfig, dtype: type[np.integer]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already use all cores
    _worker.update(tokenizer=build_tokenizer(config), dtype=dtype)


def _encode_in_worker(texts: Sequence[str], num_bytes: int) -> tuple[list[np.ndarray], int]:
    return _encode(_worker["tokenizer"], texts, _worker["dtype"]), num_bytes
