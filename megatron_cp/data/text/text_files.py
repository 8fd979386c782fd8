"""Find text files in folders, and read the documents that they hold."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_cp.common.errors import DataError, readable, shown
from megatron_cp.common.input_files import decode_text, read_bytes
from megatron_cp.data.formats.jsonl import read_lines, text_under

DEFAULT_SUFFIXES = (".txt", ".jsonl")
_PACKED = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd", ".zip": "unzip"}
_SUGGESTED = 4  # endings


def _with_dots(suffixes: Sequence[str]) -> list[str]:
    return [f".{suffix}" if suffix and not suffix.startswith(".") else suffix for suffix in suffixes]


def search(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str]) -> tuple[list[Path], Counter[str]]:
    """The files to read, and how many others the folders hold, by their ending.

    Each input file is read as given, each folder is searched for ``suffixes`` in sorted order. A suffix may lack its
    dot; an empty one stands for files without an ending.

    Raises:
        DataError: an input that does not exist, or a folder without any such file.
    """
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
                rest = f" It has {left_out(of_others, suffixes)}" if of_others else ""
                raise DataError(f"{path}: no file that ends with {named} in this folder.{rest}")
            files += sorted(found)
            others += of_others
        else:
            raise DataError(f"{path}: no such file or folder.")
    if not files:
        raise DataError("no input: name text files, .jsonl files or folders.")
    return files, others


def left_out(others: Counter[str], suffixes: Sequence[str]) -> str:
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
    with readable(file):
        raw = read_bytes(file)
    try:
        yield decode_text(raw, file), len(raw)
    except ValueError as error:
        if file.suffix in _PACKED:
            command = f"{_PACKED[file.suffix]} {shlex.quote(str(file))}"
            raise DataError(f"{file}: is compressed; uncompress it first: {command}") from error
        raise DataError(f"{file}: {error}") from error


def _json_text(value: dict[str, Any], json_key: str) -> str:
    if json_key not in value:
        raise ValueError(f"no key {json_key!r}; it has {sorted(value)}. Name one with --json-key.")
    return text_under(json_key, value)
