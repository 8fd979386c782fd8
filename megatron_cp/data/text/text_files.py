"""Find text files in folders, and read their documents."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_cp.common.errors import DataError, join_limited, readable
from megatron_cp.common.input_files import decode_text, read_bytes
from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.data.formats.rows import PARQUET, read_lines, text_under
from megatron_cp.data.text.dialogues import SHARE_GPT

DEFAULT_SUFFIXES = (".txt", ".jsonl")
_PACKED = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd", ".zip": "unzip"}
_SUGGESTED = 4  # endings
_DATA = DatasetConfig()
_UNDER_LOSS_MASKS: dict[str, set[str | None]] = {
    "a dialogue": {_DATA.messages_key},
    "a dialogue in ShareGPT's form": {SHARE_GPT},
    "a prompt and a response": {_DATA.prompt_key, _DATA.response_key},
}


def _with_dots(suffixes: Sequence[str]) -> list[str]:
    return [f".{suffix}" if suffix and not suffix.startswith(".") else suffix for suffix in suffixes]


def search(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str]) -> tuple[list[Path], Counter[str]]:
    """Return the files to read, and the number of other files by suffix.

    Files in ``inputs`` are always read; folders are searched for ``suffixes`` in sorted order. A suffix may lack its
    dot; an empty one selects files without a suffix.

    Raises:
        DataError: an input does not exist, or a folder has no such file.
    """
    suffixes = _with_dots(suffixes)
    endings = tuple(filter(None, suffixes))
    files: list[Path] = []
    others: Counter[str] = Counter()
    for item in inputs:
        path = Path(item)
        if os.path.isfile(path):  # unlike Path.is_file, never raises
            files.append(path)
        elif os.path.isdir(path):
            found, of_others = [], Counter[str]()
            for file in filter(os.path.isfile, path.rglob("*")):
                if file.name.endswith(endings) or ("" in suffixes and not file.suffix):
                    found.append(file)
                else:
                    of_others[file.suffix] += 1
            if not found:
                named = " or ".join(suffix or "no suffix" for suffix in suffixes)
                rest = f" It has {left_out(of_others, suffixes)}" if of_others else " Fix: name another folder"
                raise DataError(f"{path}: the folder has no {named} file.{rest}")
            files += sorted(found)
            others += of_others
        else:
            raise DataError(f"{path}: no such file or folder.")
    if not files:
        raise DataError("no input. Fix: name text files, .jsonl files or folders")
    return files, others


def left_out(others: Counter[str], suffixes: Sequence[str]) -> str:
    """Return a text with the numbers of skipped files, and how to read them."""
    if not others:
        return ""
    by_number = sorted(others, key=lambda suffix: (-others[suffix], suffix))
    text = join_limited([f"{others[suffix]:,} {suffix or 'without a suffix'}" for suffix in by_number], ", ") + "."
    packed = [suffix for suffix in by_number if suffix in _PACKED]
    plain = [suffix for suffix in by_number if suffix not in _PACKED]
    if plain:  # together with the current suffixes, which the option replaces
        named = " ".join(suffix or "''" for suffix in (*_with_dots(suffixes), *plain[:_SUGGESTED]))
        text += f" Fix: --suffix {named} (reads {'them' if len(plain) <= _SUGGESTED else 'the most frequent'} as text)."
    return text + (f" Uncompress {' and '.join(packed)} first." if packed else "")


def read_documents(file: Path, json_key: str = "text") -> Iterator[tuple[str, int]]:
    """Yield (text, bytes in the file) of each document of a file.

    Raises:
        DataError: the text is not UTF-8, or a line is not a JSON object with a string under ``json_key``.
    """
    if file.suffix in (".jsonl", ".json"):  # Megatron's own tool reads JSON lines under either suffix
        for text, num_bytes in read_lines(file, lambda value: _json_text(value, json_key, file)):
            yield text or "", num_bytes
        return
    if file.suffix == PARQUET:
        raise DataError(f"{file}: preprocess reads texts and JSON lines. {_as_it_is(file)}")
    with readable(file):
        raw = read_bytes(file)
    try:
        yield decode_text(raw, file), len(raw)
    except ValueError as error:
        if file.suffix in _PACKED:
            command = f"{_PACKED[file.suffix]} {shlex.quote(str(file))}"
            raise DataError(f"{file}: is compressed. Fix: {command}") from error
        raise DataError(f"{file}: {error}") from error


def _as_it_is(file: Path) -> str:
    """Return the fix for a file that runs tokenize themselves."""
    setting = shlex.quote(f"{NAME.dataset.data_path}={file}")
    return f"Fix: leave out preprocess, and set {setting} (train and evaluate tokenize the file once)"


def _json_text(value: dict[str, Any], json_key: str, file: Path) -> str:
    if isinstance(value.get(json_key, value), list | dict):
        # The row has no text under the key. Files of tokens do not hold which of them are in the loss.
        for what, keys in _UNDER_LOSS_MASKS.items():
            if keys.issubset(value):
                raise ValueError(f"is {what}; .bin and .idx files hold no loss mask. {_as_it_is(file)}")
    if json_key not in value:
        raise ValueError(f"has no key {json_key!r}; its keys are {sorted(value)}. Fix: --json-key KEY (one of these)")
    return text_under(json_key, value)
