"""Text into Megatron ``.bin``/``.idx`` files.

A text file is one document; each line of a ``.jsonl`` or ``.json`` file is one document, under one key. Every document
ends with the tokenizer's end-of-document token.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.config import TokenizerConfig
from megatron_cp.data.jsonl import read_lines, text_under
from megatron_cp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_cp.data.tokenizing import encode, indexed_writer
from megatron_cp.errors import DataError, shown
from megatron_cp.input_files import read_bytes
from megatron_cp.terminal import say

DEFAULT_SUFFIXES = (".txt", ".jsonl")
_PACKED = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd", ".zip": "unzip"}
_SUGGESTED = 4  # endings
_CHUNK_BYTES = 1 << 18  # text handed to a worker at once
_CHUNKS_IN_FLIGHT = 4  # per worker: bounds the memory


@dataclass(frozen=True)
class Summary:
    """What was written, and what is said of a folder's files that were left out for their endings."""

    prefix: str
    documents: int
    tokens: int
    empty_documents: int
    text_bytes: int
    left_out: str = ""


def find_files(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> list[Path]:
    """The files to read: each input file as given, each folder searched for ``suffixes`` in sorted order.

    A suffix may lack its dot; an empty one stands for files without an ending.

    Raises:
        DataError: an input that does not exist, or a folder without any such file.
    """
    return _search(inputs, suffixes)[0]


def _with_dots(suffixes: Sequence[str]) -> list[str]:
    return [f".{suffix}" if suffix and not suffix.startswith(".") else suffix for suffix in suffixes]


def _search(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str]) -> tuple[list[Path], Counter[str]]:
    """The files to read, and how many others the folders hold, by their ending."""
    suffixes = _with_dots(suffixes)
    endings = tuple(filter(None, suffixes))
    files: list[Path] = []
    others: Counter[str] = Counter()
    for item in inputs:
        path = Path(item)
        if os.path.isfile(path):  # which, unlike Path.is_file, never raises
            files.append(path)
        elif os.path.isdir(path):
            found, of_others = [], Counter[str]()
            for file in filter(os.path.isfile, path.rglob("*")):
                if file.name.endswith(endings) or ("" in suffixes and not file.suffix):
                    found.append(file)
                else:
                    of_others[file.suffix] += 1
            if not found:
                named = " or ".join(suffix or "no ending" for suffix in suffixes)
                rest = f" It has {_left_out(of_others, suffixes)}" if of_others else ""
                raise DataError(f"{path}: no file that ends with {named} in this folder.{rest}")
            files += sorted(found)
            others += of_others
        else:
            raise DataError(f"{path}: no such file or folder.")
    if not files:
        raise DataError("no input: name text files, .jsonl files or folders.")
    return files, others


def _left_out(others: Counter[str], suffixes: Sequence[str]) -> str:
    """How many files have endings that are not read, and how to read them."""
    if not others:
        return ""
    by_number = sorted(others, key=lambda suffix: (-others[suffix], suffix))
    text = shown([f"{others[suffix]:,} {suffix or 'without an ending'}" for suffix in by_number], ", ") + "."
    packed = [suffix for suffix in by_number if suffix in _PACKED]
    plain = [suffix for suffix in by_number if suffix not in _PACKED]
    if plain:  # named beside those that are read, which the option would take away
        named = " ".join(suffix or "''" for suffix in (*_with_dots(suffixes), *plain[:_SUGGESTED]))
        text += f" --suffix {named} reads {'these' if len(plain) <= _SUGGESTED else 'the most frequent'} as text too."
    return text + (f" Uncompress {' and '.join(packed)} first." if packed else "")


def read_documents(file: Path, json_key: str = "text") -> Iterator[tuple[str, int]]:
    """(text, bytes of the file it took) of each document of a file.

    Raises:
        DataError: text that is not UTF-8, or a line that is not a JSON object with a string under ``json_key``.
    """
    if file.suffix in (".jsonl", ".json"):  # what Megatron's own tool is fed: JSON lines under either name
        for text, num_bytes in read_lines(file, lambda value: _json_text(value, json_key)):
            yield text or "", num_bytes
        return
    try:
        raw = read_bytes(file)
        yield raw.decode("utf-8"), len(raw)
    except UnicodeDecodeError as error:
        if file.suffix in _PACKED:
            command = f"{_PACKED[file.suffix]} {shlex.quote(str(file))}"
            raise DataError(f"{file}: is compressed; uncompress it first: {command}") from error
        raise DataError(f"{file}: is not UTF-8 text (byte {error.start}): {error.reason}.") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}.") from error


def _json_text(value: dict[str, Any], json_key: str) -> str:
    if json_key not in value:
        raise ValueError(f"no key {json_key!r}; it has {sorted(value)}. Name one with --json-key.")
    return text_under(json_key, value)


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
    """Tokenize ``inputs`` into ``output_prefix.bin`` and ``output_prefix.idx``; documents keep the order of the inputs.

    ``workers`` processes tokenize; 1 does it in this process. The result does not depend on it. Empty documents are
    left out.

    Raises:
        DataError: bad input (see :func:`find_files` and :func:`read_documents`), or no token in all of it.
        OSError: the output cannot be written.
    """
    if workers < 1:
        raise DataError(f"workers={workers}: must be 1 or more.")
    tokenizer = build_tokenizer(tokenizer_config)
    files, others = _search(inputs, suffixes)
    prefix = str(output_prefix).removesuffix(".bin").removesuffix(".idx")
    if not prefix or prefix.endswith(os.sep):
        raise DataError(f"output_prefix={str(output_prefix)!r}: must end in a name, to which .bin and .idx are added.")
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    progress = progress or Progress()
    documents = tokens = empty = text_bytes = 0
    progress.start(sum(file.stat().st_size for file in files))
    source = f"{files[0]}{' and the other files' if len(files) > 1 else ''}"
    try:
        with indexed_writer(prefix, tokenizer.vocab_size, source) as writer:
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
    return Summary(prefix, documents, tokens, empty, text_bytes, _left_out(others, suffixes))


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
