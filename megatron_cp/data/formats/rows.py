"""Read the rows of ``.jsonl`` and ``.parquet`` files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_cp.common.errors import DataError, readable
from megatron_cp.common.input_files import decode_text, file_or_pipe, parse_json

PARQUET = ".parquet"
ENDINGS = (".jsonl", PARQUET)  # of files with a sample a row
_ROWS_AT_ONCE = 256  # of a Parquet file; a row group as a whole may not fit into memory


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, row) of each row; blank lines are skipped.

    Raises:
        DataError: the file cannot be read, or a row is not an object.
    """
    if file.suffix == PARQUET:
        yield from enumerate(_parquet_rows(file), 1)
        return
    for number, (row, _) in enumerate(read_lines(file, lambda row: row), 1):
        if row is not None:
            yield number, row


def read_lines[T](file: Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[tuple[T | None, int]]:
    """Yield ``parse(object)`` of each line (None if blank) and the line's bytes.

    Raises:
        DataError: the file cannot be read, a line is not a JSON object, or ``parse`` raises ValueError.
    """
    with readable(file), open(file, "rb", opener=file_or_pipe) as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = decode_text(line, file)  # in a concatenated file, any line may begin with a byte order mark
                value = parse(_object(text)) if text.strip() else None
            except ValueError as error:
                raise DataError(f"{file}:{number}: {error}") from error
            yield value, len(line)


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    with readable(file), open(file, "rb", opener=file_or_pipe) as stream:
        if not os.fstat(stream.fileno()).st_size:
            raise DataError(f"{file}: is empty. Fix: name a file with samples")
        try:
            for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield {key: value for key, value in row.items() if value is not None}
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            why = " ".join(str(error).split())
            raise DataError(f"{file}: cannot be read as Parquet: {why}. Fix: name another file") from error


def _object(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object; raise ValueError if it is not one."""
    try:
        value = parse_json(line)
    except ValueError as error:
        cut_short = "" if line.endswith("\n") else " The file ends in this line and may be truncated."
        raise ValueError(f"not valid JSON: {error}.{cut_short}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, found {type(value).__name__}.")
    return value


def text_under(key: str | None, values: dict[Any, Any]) -> str:
    """Return the text under ``key``; raise ValueError if no tokenizer can encode it."""
    text = values[key]
    if not isinstance(text, str):
        raise ValueError(f"the value of {key!r} is {type(text).__name__}, not text.")
    check_encodable(text, f"the value of {key!r}")
    return text


def check_encodable(text: str, what: str) -> None:
    """Raise ValueError if no tokenizer can encode ``text``."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has half a surrogate pair (such as \\ud800 alone). Fix: write the whole pair, or remove it"
        ) from error
